// Run by test_javascript.py in node, beside a server whose room for bytes it takes and gives back.

import { connect } from "../../docs/trioengine.mjs";
import { order } from "./javascript_orders.mjs";

const GREEDY = { temperature: 0, max_output_tokens: 40 };
const LONG = "y".repeat(2000);
const BIAS = Object.fromEntries(Array.from({ length: 200 }, (_, index) => [`${index + 20}`, 0.5]));

async function thrown(promise) {
  try {
    await promise;
  } catch (error) {
    return [error.code, error.closeCode, error.retryAfter, error.message];
  }
}

const [url] = process.argv.slice(2);
const losses = [];
const session = await connect(url, { onLoss: (error) => losses.push(error.closeCode) });
const ids = new Set([session.id]);
const ask = (text, settings = {}) => session.generate(text, { ...GREEDY, ...settings }).result();
const refusals = [];
const answers = [(await ask("hello")).text];
for (const drop of [
  () => ask(LONG),
  () => ask(undefined, { logit_bias: BIAS }),
  () => session.say(LONG),
  () => session.update({ instructions: LONG }),
]) {
  await order("take");
  refusals.push(await thrown(drop()));
  await order("give");
  answers.push((await ask("and now?")).text);
  ids.add(session.id);
}
const results = { refusals, answers, losses, history: session.history, count: ids.size };
await session.close();
console.log(JSON.stringify({ results }));
process.exit(0);
