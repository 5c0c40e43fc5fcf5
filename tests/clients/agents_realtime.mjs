// OpenAI's agents over the Realtime protocol: the agent's instructions and tools arrive, and a tool is called.

import assert from "node:assert/strict";
import { RealtimeAgent, RealtimeSession, tool } from "@openai/agents-realtime";
import { z } from "zod";
import { BASE_URL, MODEL, report } from "./report.mjs";

const url = `${BASE_URL.replace(/^http/, "ws")}/v1/realtime?model=${MODEL}`;
const instructions = "Answer in one short sentence.";
const TIMEOUT = 60_000; // milliseconds

function weather(execute) {
  const parameters = z.object({ city: z.enum(["Paris", "Rome"]) });
  return tool({ name: "weather", description: "The weather of a city", parameters, execute });
}

// Connect an agent, run `body` with the session, a function that waits for an event, and the settings; close.
async function withAgent({ tools = [], toolChoice = "auto" }, body) {
  const agent = new RealtimeAgent({ name: "guide", instructions, tools });
  const config = { outputModalities: ["text"], toolChoice, providerData: { temperature: 0, max_output_tokens: 48 } };
  const session = new RealtimeSession(agent, { transport: "websocket", model: MODEL, config, tracingDisabled: true });
  const events = [];
  let failure = null, wake = () => {};
  session.on("transport_event", (event) => { events.push(event); wake(); });
  session.on("error", ({ error }) => { failure = error; wake(); });
  const next = async (type, isWanted = () => true) => {
    const deadline = setTimeout(() => { failure = new Error(`no ${type}; events: ${events.map((event) => event.type)}`); wake(); }, TIMEOUT);
    try {
      for (;;) {
        const found = events.findIndex((event) => event.type === type && isWanted(event));
        if (found >= 0) return events.splice(0, found + 1).at(-1);
        if (failure) throw new Error(failure.message ?? JSON.stringify(failure));
        await new Promise((resolve) => { wake = resolve; });
      }
    } finally {
      clearTimeout(deadline);
    }
  };
  await session.connect({ apiKey: "none", url });
  try {
    // earlier updates are of other settings, such as tracing
    const { session: settings } = await next("session.updated", (event) => event.session.instructions === instructions);
    await body(session, next, settings);
  } finally {
    session.close();
  }
}

const answer = () => withAgent({}, async (session, next) => {
  session.sendMessage("Name the capital of France.");
  const { text } = await next("response.output_text.done");
  assert.match(text, /Paris/);
  await next("response.done");
  const last = session.history.at(-1);
  assert.equal(last.role, "assistant");
  assert.match(last.content[0].text, /Paris/);
});

const toolsArrive = () => withAgent({ tools: [weather(async () => "clear")] }, async (_session, _next, settings) => {
  assert.deepEqual(settings.tools?.map(({ type, name }) => [type, name]), [["function", "weather"]]);
  assert.equal(settings.tool_choice, "auto");
});

// The first response is a forced call; the session sends its result, and the second response is a text.
const call = () => {
  const asked = [];
  let session;
  const execute = async ({ city }) => {
    asked.push(city);
    session.transport.updateSessionConfig({ outputModalities: ["text"], toolChoice: "none" });
    return "clear";
  };
  return withAgent({ tools: [weather(execute)], toolChoice: "required" }, async (opened, next) => {
    session = opened;
    session.sendMessage("How is the weather in Rome?");
    await next("response.function_call_arguments.done");
    await next("response.done");
    await next("response.output_text.done");
    await next("response.done");
    assert.ok(["Paris", "Rome"].includes(asked[0]));
    const called = session.history.find(({ type }) => type === "function_call");
    assert.equal(called.name, "weather");
    assert.equal(called.output, "clear");
  });
};

await report({ "instructions and an answer": answer, "tools arrive": toolsArrive, "a tool is called": call });
