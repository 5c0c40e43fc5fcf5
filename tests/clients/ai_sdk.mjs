// The AI SDK, by its provider for servers with OpenAI's API, and by OpenAI's own provider.

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, isStepCount, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { BASE_URL, MODEL, report } from "./report.mjs";

const baseURL = `${BASE_URL}/v1`;
const compatible = createOpenAICompatible({ name: "trioengine", baseURL, supportsStructuredOutputs: true, includeUsage: true });
const openai = createOpenAI({ baseURL, apiKey: "none" });
const models = { compatible: compatible(MODEL), openai: openai.chat(MODEL) };

const options = { temperature: 0, maxOutputTokens: 64, maxRetries: 0 };
const oneCall = { trioengine: { parallel_tool_calls: false }, openai: { parallelToolCalls: false } };
const question = "Name the capital of France.";
const schema = z.object({ city: z.string().max(20), people: z.number().int().min(0).max(99999999) });
const weather = (asked) => tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
  execute: async ({ city }) => {
    asked.push(city);
    return { sky: "clear" };
  },
});

async function text(model) {
  const { text, finishReason, usage } = await generateText({ model, prompt: question, ...options });
  assert.match(text, /Paris/);
  assert.equal(finishReason, "stop");
  assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0);
}

async function streamed(model) {
  const result = streamText({ model, prompt: question, ...options, onError: ({ error }) => { throw error; } });
  let pieces = 0, whole = "";
  for await (const piece of result.textStream) {
    pieces += 1;
    whole += piece;
  }
  assert.ok(pieces > 1);
  assert.match(whole, /Paris/);
  assert.ok((await result.usage).outputTokens > 0);
}

async function object(model) {
  const { object } = await generateObject({ model, schema, prompt: "Describe Paris.", ...options });
  schema.parse(object);
}

async function streamedObject(model) {
  const result = streamObject({ model, schema, prompt: "Describe Paris.", ...options });
  let pieces = 0;
  for await (const _ of result.partialObjectStream) pieces += 1;
  assert.ok(pieces > 1);
  schema.parse(await result.object);
}

// The first step is a forced call; the second one answers with its result in the history.
async function tools(model) {
  const asked = [];
  const { steps } = await generateText({
    model, ...options, prompt: "How is the weather in Rome?", tools: { weather: weather(asked) },
    stopWhen: isStepCount(2), providerOptions: oneCall,
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  });
  assert.equal(steps.length, 2);
  assert.equal(steps[0].finishReason, "tool-calls");
  assert.deepEqual(steps[0].toolResults.map(({ output }) => output), [{ sky: "clear" }]);
  assert.equal(asked.length, 1);
  assert.ok(steps[1].text.length > 0);
}

async function streamedTools(model) {
  const asked = [];
  const result = streamText({
    model, ...options, prompt: "How is the weather in Rome?", tools: { weather: weather(asked) },
    toolChoice: { type: "tool", toolName: "weather" }, providerOptions: oneCall,
  });
  const types = [];
  for await (const part of result.fullStream) types.push(part.type);
  for (const type of ["tool-input-delta", "tool-call", "tool-result"]) assert.ok(types.includes(type), types.join());
  assert.equal(asked.length, 1);
}

const checks = { generateText: text, streamText: streamed, generateObject: object, streamObject: streamedObject, tools, "streamed tools": streamedTools };
const named = Object.entries(models).flatMap(([provider, model]) =>
  Object.entries(checks).map(([name, check]) => [`${name} (${provider})`, () => check(model)]));
await report(Object.fromEntries(named));
