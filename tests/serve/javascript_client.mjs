// Run by test_javascript.py, in node and in a browser: a program with docs/trioengine.mjs, which gives its results.

import { connect } from "../../docs/trioengine.mjs";

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

async function askedAside(url) {
  const session = await connect(url, options);
  try {
    await session.generate("x", GREEDY).result();
  } finally {
    await session.close();
  }
}

export async function run(url, wrongUrl) {
  const results = {};
  const session = await connect(url, options);
  results.id = session.id;

  const first = session.generate("hello", GREEDY);
  const texts = [];
  for await (const text of first) texts.push(text);
  results.first = [texts.join(""), first.text, first.response.status];
  results.second = await session.generate("and then?", GREEDY).result();

  for await (const text of session.generate("stop", LONG)) {
    results.partial = text;
    break;
  }
  const waiting = session.generate("once more", GREEDY);
  results.busy = await thrown((async () => session.generate("too many"))());
  results.afterCancel = (await waiting.result()).status;

  results.settings = (await session.update({ instructions: "be" })).instructions;
  results.badSetting = await thrown(session.update({ temperature: -1 }));
  results.badRequest = await thrown(session.generate("x", { temperature: -1 }).result());
  results.badItem = await thrown(session.say("x", "tool"));
  results.tooLong = await thrown(session.generate("x".repeat(9999)).result());
  await session.close();
  results.afterClose = await thrown(session.generate("x").result());
  results.sayAfterClose = await thrown(session.say("x"));

  const many = await connect(`${url}/v1`, options);
  results.many = (await Promise.all(Array.from({ length: 200 }, () => many.say("a")))).length;
  const unfinished = many.generate(undefined, LONG);
  await many.close();
  results.lost = await thrown(unfinished.result());

  const states = [];
  const told = await connect(url, { ...options, apiKey: "admin", onState: (state) => states.push(state) });
  const operate = (path) => fetch(url + path, { method: "POST", headers: { Authorization: "Bearer admin" } });
  const kept = told.generate("hello", GREEDY);
  await kept[Symbol.asyncIterator]().next();
  const slept = await operate("/sleep?mode=keep");
  results.asleep = slept.ok ? await thrown(askedAside(url)) : slept.status;
  await operate("/wake_up");
  results.kept = (await kept.result()).text;
  results.states = states;
  await told.close();

  results.wrongKey = (await thrown(connect(url, { apiKey: "wrong" })))?.slice(0, 2);
  results.nobody = (await thrown(connect(wrongUrl)))?.slice(0, 2);
  return results;
}
