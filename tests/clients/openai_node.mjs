// OpenAI's package for Node over TLS: HTTP, and the Realtime protocol, whose URL it always makes wss.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { OpenAIRealtimeWS } from "openai/realtime/ws";
import { BASE_URL, MODEL, report } from "./report.mjs";

const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Name the capital of France." }];
const options = { model: MODEL, temperature: 0, max_completion_tokens: 48 };
const parameters = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"], additionalProperties: false };

async function models() {
  const { data } = await client.models.list();
  assert.deepEqual(data.map(({ id }) => id), [MODEL]);
}

async function chat() {
  const { choices, usage } = await client.chat.completions.create({ ...options, messages });
  assert.match(choices[0].message.content, /Paris/);
  assert.ok(usage.completion_tokens > 0);
}

async function streamedChat() {
  const stream = client.chat.completions.stream({ ...options, messages, stream_options: { include_usage: true } });
  let pieces = 0;
  for await (const { choices } of stream) pieces += choices.length;
  assert.ok(pieces > 2);
  const completion = await stream.finalChatCompletion();
  assert.match(completion.choices[0].message.content, /Paris/);
  assert.ok(completion.usage.completion_tokens > 0);
}

async function structured() {
  const response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema: parameters } };
  const { choices } = await client.chat.completions.parse({ ...options, messages, response_format });
  assert.ok(["Paris", "Rome"].includes(choices[0].message.parsed.city));
}

async function tools() {
  const tool = { type: "function", function: { name: "weather", description: "The weather of a city", parameters, strict: true } };
  const stream = client.chat.completions.stream({ ...options, messages, tools: [tool], tool_choice: "required", parallel_tool_calls: false });
  const { choices } = await stream.finalChatCompletion();
  const [call] = choices[0].message.tool_calls;
  assert.equal(choices[0].finish_reason, "tool_calls");
  assert.ok(["Paris", "Rome"].includes(call.function.parsed_arguments.city));
  const history = [...messages, choices[0].message, { role: "tool", tool_call_id: call.id, content: "clear" }];
  const answer = await client.chat.completions.create({ ...options, messages: history, tools: [tool], tool_choice: "none" });
  assert.ok(answer.choices[0].message.content);
}

async function completions() {
  const { choices } = await client.completions.create({ model: MODEL, prompt: "1, 2, 3, 4,", temperature: 0, max_tokens: 8 });
  assert.match(choices[0].text, /5/);
}

// Two turns of a conversation.
async function realtime() {
  const socket = new OpenAIRealtimeWS({ model: MODEL }, client);
  assert.equal(socket.url.protocol, "wss:");
  let failure = null, wake = () => {};
  const events = [];
  socket.on("event", (event) => { events.push(event); wake(); });
  socket.on("error", (error) => { failure = error; wake(); });
  socket.socket.on("close", () => { failure ??= new Error("closed"); wake(); });
  const next = async (type) => {
    for (;;) {
      const found = events.findIndex((event) => event.type === type);
      if (found >= 0) return events.splice(0, found + 1).at(-1);
      if (failure) throw failure;
      await new Promise((resolve) => { wake = resolve; });
    }
  };
  await next("session.created");
  const session = { type: "realtime", instructions: "Answer in one sentence.", output_modalities: ["text"], max_output_tokens: 48, temperature: 0 };
  socket.send({ type: "session.update", session });
  await next("session.updated");
  for (const [question, expected] of [["Name the capital of France.", /Paris/], ["In which country is it?", /./]]) {
    socket.send({ type: "conversation.item.create", item: { type: "message", role: "user", content: [{ type: "input_text", text: question }] } });
    socket.send({ type: "response.create" });
    await next("response.output_text.delta");
    const { text } = await next("response.output_text.done");
    assert.match(text, expected);
    const { response } = await next("response.done");
    assert.ok(response.usage.output_tokens > 0);
    assert.ok(["completed", "incomplete"].includes(response.status), response.status);
  }
  socket.close();
}

await report({ models, chat, "streamed chat": streamedChat, "structured output": structured, tools, completions, "realtime over TLS": realtime });
