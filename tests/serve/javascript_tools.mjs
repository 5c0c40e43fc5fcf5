// Run by test_javascript_tools.py in node: tools with docs/trioengine.mjs.

import { connect } from "../../docs/trioengine.mjs";

const GREEDY = { temperature: 0, max_output_tokens: 200 };
const TEXT = { temperature: 0, max_output_tokens: 20, ignore_eos: true };

async function thrown(promise) {
  try {
    await promise;
  } catch (error) {
    return [error.name, error.code, error.param];
  }
}

export async function run(url, tool) {
  const results = {};
  const forced = { ...GREEDY, tools: [tool], tool_choice: { type: "function", name: tool.name } };
  const session = await connect(url);
  const generation = session.generate("hello", forced);
  for await (const _ of generation);
  results.called = await generation.result();
  results.own = generation.tool_calls;
  const [{ call_id }] = results.called.tool_calls;
  results.answered = await session.generate([{ call_id, output: "sunny" }], { ...TEXT, tools: [tool] }).result();
  results.history = session.history;

  const cancelled = session.generate("again", forced);
  cancelled.cancel();
  results.cancelled = [(await cancelled.result()).tool_calls, session.history.length];
  results.cut = await session.generate("cut", { ...forced, max_output_tokens: 60 }).result();
  results.cutHistory = session.history.slice(results.history.length);
  results.refused = await thrown(session.generate([{ call_id, output: 1 }], GREEDY).result());
  results.unknown = await thrown(session.generate("hello", { tools: 1 }).result());
  results.still = session.history.length;
  await session.close();

  const copy = await connect(url, { history: results.history });
  results.copied = copy.history;
  results.continued = await copy.generate("more", { ...TEXT, tools: [tool] }).result();
  await copy.close();
  const twin = await connect(url, { history: results.history });
  await twin.update({ tools: [tool], tool_choice: "required", parallel_tool_calls: false });
  results.updated = (await twin.generate("more", GREEDY).result()).tool_calls.length;
  await twin.close();
  return results;
}
