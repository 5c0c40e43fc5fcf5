// Run by test_javascript.py, in node and in a browser: a program with docs/trioengine.mjs, which returns its results.

import { connect, Session } from "../../docs/trioengine.mjs";

const options = { apiKey: "secret", model: "toy" };
const GREEDY = { temperature: 0, max_output_tokens: 40 };
const LONG = { temperature: 0, max_output_tokens: 400, ignore_eos: true };

async function thrown(promise) {
  try {
    await promise;
  } catch (error) {
    return [error.name, error.code, error.param];
  }
}

async function refused(promise) {
  try {
    await promise;
  } catch (error) {
    return [error.code, error.status, error.message];
  }
}

/** Read this answer until its first text, then cancel it. */
async function cancelled(generation) {
  for await (const _ of generation) break;
  return generation.text;
}

async function askedAside(url) {
  const session = await connect(url, options);
  try {
    await session.generate("x", GREEDY).result();
  } finally {
    await session.close();
  }
}

async function conversation(url, results) {
  const session = await connect(url, options);
  results.id = session.id;
  const first = session.generate("hello", GREEDY);
  const texts = [];
  for await (const text of first) texts.push(text);
  results.first = [texts.join(""), first.text, first.response.status];
  results.second = await session.generate("and then?", GREEDY).result();
  results.history = session.history;
  await session.close();
}

/** Turns that are cancelled or refused leave nothing, here and at the server; and each answer has its own text. */
async function takenBack(url, results) {
  const session = await connect(url, options);
  results.cancelledText = await cancelled(session.generate("stop", LONG));
  const rapid = ["one", "two", "three", "four"].map((text, index) => {
    const generation = session.generate(text, GREEDY);
    if (index < 3) generation.cancel();
    return generation;
  });
  results.busy = await thrown((async () => session.generate("too many"))());
  results.rapid = (await Promise.all(rapid.map((generation) => generation.result()))).map(({ text, status }) => [text, status]);
  results.badRequest = await thrown(session.generate("x", { temperature: -1 }).result());
  results.badSettings = await thrown(session.generate("x", { tools: [{}] }).result());
  results.aside = await thrown((async () => session.generate("x", { conversation: "none" }))());
  results.tooLong = await thrown(session.generate("x".repeat(9999)).result());
  results.badText = await thrown(session.generate(17, GREEDY).result());
  results.badItem = await thrown(session.say("x", "tool"));
  results.badSetting = await thrown(session.update({ temperature: -1 }));
  results.afterRefusals = (await session.generate("what now?", GREEDY).result()).text;
  results.kept = await cancelled(session.generate("keep", GREEDY, { keepPartial: true }));
  results.afterKept = (await session.generate("what was that?", GREEDY).result()).text;
  results.historyOfAll = session.history;
  results.settings = (await session.update({ instructions: "be" })).instructions;
  await session.close();
  results.afterClose = await thrown(session.generate("x").result());
  results.sayAfterClose = await thrown(session.say("x"));
}

/** A chat that outgrows the context: dropped turns are gone from the conversation, here and at the server. */
async function dropped(url, results) {
  const session = await connect(url, { ...options, history: [{ role: "system", content: "be kind" }] });
  const question = (number) => `question ${number}, which is rather long, so that only a few of its kind fit in the context`;
  results.dropped = [];
  for (let number = 0; number < 8; number++) {
    const { droppedTurns } = await session.generate(question(number), { temperature: 0, max_output_tokens: 20 }).result();
    results.dropped.push([droppedTurns, session.history]);
  }
  results.undropped = await thrown(session.generate(question(8), { truncation: "disabled", max_output_tokens: 20 }).result());
  results.droppedAfter = session.history.length;
  await session.close();
}

async function windowed(url, results) {
  const many = await connect(`${url}/v1`, options);
  results.many = (await Promise.all(Array.from({ length: 200 }, () => many.say("a")))).length;
  const unfinished = many.generate(undefined, LONG);
  const readers = [unfinished.result(), unfinished.result()].map(thrown);
  await many.close();
  results.closed = await Promise.all(readers);
}

async function asleep(url, results) {
  const states = [];
  let wake;
  const awake = new Promise((resolve) => (wake = resolve));
  const onState = (state) => {
    states.push(state);
    if (state === "awake") wake();
  };
  const session = await connect(url, { ...options, apiKey: "admin", onState });
  const operate = (path) => fetch(url + path, { method: "POST", headers: { Authorization: "Bearer admin" } });
  const paused = session.generate("hello", GREEDY);
  await paused[Symbol.asyncIterator]().next();
  const slept = await operate("/sleep?mode=keep");
  results.asleep = slept.ok ? await thrown(askedAside(url)) : slept.status;
  await operate("/wake_up");
  results.paused = (await paused.result()).text;
  await awake;
  results.states = states;
  await session.close();
}

export async function run(url, wrongUrl) {
  const results = {};
  for (const part of [conversation, takenBack, dropped, windowed, asleep]) await part(url, results);
  results.wrongKey = await refused(connect(url, { apiKey: "wrong" }));
  results.oddKey = await refused((async () => new Session(url, { apiKey: "a key" }))());
  class Broken {
    constructor() {
      throw new Error("not here");
    }
  }
  results.broken = await refused(connect(url, { ...options, WebSocket: Broken }));
  results.noKey = await refused(connect(url));
  results.wrongModel = await refused(connect(url, { ...options, model: "other" }));
  results.unreachable = await refused(connect(wrongUrl));
  results.later = await refused(new Session(wrongUrl).generate("x").result());
  return results;
}
