// Run by test_javascript.py in node: a server that also sends events of responses that the session did not ask for, and
// one whose events all come in one piece.

import { connect } from "../../docs/trioengine.mjs";

const MINE = "resp_mine", OTHER = "resp_other";
const answer = (text) => ({ id: "item_answer", type: "message", role: "assistant", content: [{ type: "output_text", text }] });
const delta = (response_id, text) => ({ type: "response.output_text.delta", response_id, item_id: "item_answer", delta: text });
const done = (id) => ({ type: "response.done", response: { id, status: "completed", output: [], usage: null } });
const SCRIPT = [
  delta(OTHER, "before"),
  { type: "response.created", response: { id: MINE, status: "in_progress" } },
  { type: "response.created", response: { id: OTHER, status: "in_progress" } },
  { type: "conversation.item.added", previous_item_id: "item_1", item: answer("") },
  { type: "response.output_item.added", response_id: MINE, item: answer("") },
  delta(OTHER, "not mine"),
  delta(MINE, "mine"),
  done(OTHER),
  delta(MINE, "more"),
  { type: "conversation.item.done", previous_item_id: "item_1", item: answer("minemore") },
  done(MINE),
  delta(MINE, "late"),
];

class StrangeServer extends EventTarget {
  readyState = 1;

  constructor() {
    super();
    setTimeout(() => {
      this.dispatchEvent(new Event("open"));
      this.say({ type: "session.created", session: { id: "sess_strange" } });
    });
  }

  send(text) {
    const event = JSON.parse(text);
    if (event.type === "conversation.item.create") this.takeItem(event);
    else if (event.type === "response.create") this.respond();
  }

  takeItem({ item }) {
    this.say({ type: "conversation.item.added", previous_item_id: null, item });
    this.say({ type: "conversation.item.done", previous_item_id: null, item });
  }

  respond() {
    SCRIPT.forEach((event, index) => setTimeout(() => this.say(event), index));
  }

  close() {
    this.dispatchEvent(Object.assign(new Event("close"), { code: 1000, reason: "" }));
  }

  say(event) {
    this.dispatchEvent(Object.assign(new Event("message"), { data: JSON.stringify(event) }));
  }
}

/** It refuses the question, and has answered without it before the session learns that. */
class HastyServer extends StrangeServer {
  #refusal;

  takeItem({ event_id }) {
    this.#refusal = { type: "error", error: { type: "invalid_request_error", code: "too_bad", message: "no", event_id } };
  }

  respond() {
    const added = { type: "conversation.item.added", previous_item_id: null, item: answer("") };
    const whole = { type: "conversation.item.done", previous_item_id: null, item: answer("more") };
    const started = { type: "response.created", response: { id: MINE, status: "in_progress" } };
    const first = { type: "response.output_item.added", response_id: MINE, item: answer("") };
    const script = [this.#refusal, started, first, added, delta(MINE, "more"), whole, done(MINE)];
    setTimeout(() => script.forEach((event) => this.say(event)));
  }
}

export async function run() {
  return { ...(await amongOthers()), refused: await refusedAndAnswered() };
}

async function refusedAndAnswered() {
  const session = await connect("ws://localhost", { WebSocket: HastyServer });
  const error = await session.generate("hello").result().catch((error) => error.code);
  const results = [error, session.history];
  await session.close();
  return results;
}

async function amongOthers() {
  const session = await connect("ws://localhost", { WebSocket: StrangeServer });
  const generation = session.generate("hello");
  const texts = [];
  for await (const text of generation) texts.push(text);
  const results = { texts, result: await generation.result(), history: session.history };
  await session.close();
  return results;
}
