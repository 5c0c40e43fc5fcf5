// Run by test_javascript.py in node: the messages of mistakes in arguments, and of a question that the server refuses.

import { Session } from "../../docs/trioengine.mjs";

const URL = "ws://127.0.0.1:1";

/** Refuses each question and its response, in one moment. */
class RefusingServer extends EventTarget {
  readyState = 1;
  #refused = [];

  constructor() {
    super();
    setTimeout(() => {
      this.dispatchEvent(new Event("open"));
      this.#say({ type: "session.created", session: { id: "sess_refusing" } });
    });
  }

  send(text) {
    const { event_id, type } = JSON.parse(text);
    this.#refused.push({ type: "error", error: { event_id, code: "refused", message: type } });
    if (type === "response.create") setTimeout(() => this.#refused.forEach((event) => this.#say(event)));
  }

  close() {
    this.dispatchEvent(Object.assign(new Event("close"), { code: 1000, reason: "" }));
  }

  #say(event) {
    this.dispatchEvent(Object.assign(new Event("message"), { data: JSON.stringify(event) }));
  }
}

async function refusal() {
  const session = new Session(URL, { WebSocket: RefusingServer });
  const message = await session.generate(5).result().catch((error) => error.message);
  await session.close();
  return message;
}

export async function run() {
  const mistakes = [
    () => new Session(URL, { apikey: "x", histroy: [] }),
    () => new Session("127.0.0.1:8000"),
    () => new Session("localhost:8000"),
    () => new Session(),
    () => new Session(URL, { history: "hi" }),
    () => new Session(URL).generate("hi", {}, { keep_partial: true }),
  ];
  const messages = mistakes.map((mistake) => {
    try {
      mistake();
    } catch (error) {
      return error.message;
    }
  });
  return [...messages, await refusal()];
}
