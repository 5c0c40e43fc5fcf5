// A client of trioengine's Realtime protocol, for browsers and for node: 22 and newer, before that with the package ws.
//
//   const session = await connect("ws://localhost:8000");
//   for await (const text of session.generate("Hello!", { max_output_tokens: 64, temperature: 0 })) show(text);
//   await session.close();
//
// What goes wrong is thrown as a TrioengineError: it has the server's code, and the field at fault (param).

const PATH = "/v1/realtime";
const WINDOW = 32; // events that may be unanswered; a server closes the connection at 64
const OPEN = 1;

export class TrioengineError extends Error {
  constructor({ code, message, param = null, retry_after = null }) {
    super(message);
    this.name = "TrioengineError";
    Object.assign(this, { code, param, retryAfter: retry_after });
  }
}

/** Open a session: one WebSocket. The URL is the server's, with or without /v1. Options: apiKey, model, WebSocket
 *  where there is no global one, and onState(state), which is told when the engine sleeps, is awake, … Throws a
 *  TrioengineError with the code connection_lost when the handshake fails: why, a browser tells nobody. */
export async function connect(url, { apiKey, model, onState, WebSocket = globalThis.WebSocket } = {}) {
  if (WebSocket === undefined) throw new TypeError("there is no WebSocket: give that of the package ws as an option");
  const address = new URL(url.replace(/^http/, "ws"));
  if (["", "/v1"].includes(address.pathname.replace(/\/$/, ""))) address.pathname = PATH;
  if (model !== undefined) address.searchParams.set("model", model);
  const protocols = ["realtime"]; // a browser's WebSocket sends no headers of ours: the key goes here, too
  if (apiKey !== undefined) protocols.push(`openai-insecure-api-key.${apiKey}`);
  const session = new Session(new WebSocket(address.href, protocols), onState);
  await session.opened;
  return session;
}

export class Session {
  id = null; // the server's
  opened; // a promise of the server's first event
  closed; // a promise, kept when the WebSocket is closed, by whichever side
  #socket;
  #onState;
  #current = null; // the generation that the server works on
  #latest = null; // the one asked for last
  #promised = new Map(); // event id -> what to call with its answer
  #unsent = [];
  #unanswered = new Set(); // event ids
  #count = 0;
  #loss = null;

  constructor(socket, onState = () => {}) {
    this.#socket = socket;
    this.#onState = onState;
    this.opened = this.#promise("open");
    this.closed = new Promise((resolve) => {
      socket.addEventListener("close", (event) => resolve(this.#lose(event)));
      socket.addEventListener("error", () => resolve(this.#lose({ code: 1006, reason: "it broke" })));
    });
    socket.addEventListener("message", (message) => this.#told(JSON.parse(message.data)));
  }

  /** Change the settings of the session: instructions, temperature, max_output_tokens, … Gives all of them. */
  update(settings) {
    return this.#ask("update", { type: "session.update", session: { type: "realtime", ...settings } });
  }

  /** Add a message to the conversation. Gives its item. */
  say(text, role = "user") {
    const part = { type: role === "assistant" ? "output_text" : "input_text", text };
    const item = { id: `item_${this.#count + 1}`, type: "message", role, content: [part] };
    return this.#ask("item", { type: "conversation.item.create", item });
  }

  /** Ask for an answer, to this text or to what was said until now: a Generation. One at a time, except that the next
   *  one waits for one that was cancelled. */
  generate(text, settings = {}) {
    const previous = this.#latest;
    if (previous !== null && !previous.isOver && !previous.isCancelled) {
      throw new TrioengineError({ code: "session_busy", message: "the session answers already" });
    }
    const generation = new Generation((generation) => this.#cancel(generation));
    this.#latest = generation;
    if (previous === null || previous.isOver) this.#start(generation, text, settings);
    else previous.over.then(() => this.#start(generation, text, settings));
    return generation;
  }

  /** Close the WebSocket; an answer in progress is lost. */
  close() {
    this.#socket.close(1000);
    return this.closed;
  }

  #start(generation, text, settings) {
    if (this.#loss !== null || generation.isCancelled) return generation.end(this.#loss);
    this.#current = generation;
    if (text !== undefined) this.say(text).catch((error) => generation.spoil(error));
    generation.id = this.#post("respond", { type: "response.create", response: settings });
  }

  #cancel(generation) {
    if (generation === this.#current) this.#post("cancel", { type: "response.cancel" });
  }

  // ---- what is sent

  #promise(id) {
    return new Promise((resolve, reject) => this.#promised.set(id, { resolve, reject }));
  }

  #ask(what, event) {
    if (this.#loss !== null) return Promise.reject(this.#loss);
    return this.#promise(this.#post(what, event));
  }

  #post(what, event) {
    const id = `${what}_${++this.#count}`;
    this.#unsent.push([id, JSON.stringify({ event_id: id, ...event })]);
    queueMicrotask(() => this.#send());
    return id;
  }

  #send() {
    while (this.#unsent.length > 0 && this.#unanswered.size < WINDOW && this.#socket.readyState === OPEN) {
      const [id, text] = this.#unsent.shift();
      if (this.#promised.has(id)) this.#unanswered.add(id);
      this.#socket.send(text);
    }
  }

  // ---- what the server says

  #told(event) {
    switch (event.type) {
      case "session.created":
        this.id = event.session.id;
        return this.#answered("open", event.session);
      case "session.updated": // events are answered in order
        return this.#answered([...this.#unanswered].find((id) => id.startsWith("update")), event.session);
      case "conversation.item.done":
        return this.#answered(event.item.id, event.item);
      case "response.created":
        if (this.#current !== null) this.#current.response = event.response;
        return;
      case "response.output_text.delta":
        return this.#current?.add(event.delta);
      case "response.done":
        return this.#done(event.response);
      case "engine.state":
        return this.#onState(event.state);
      case "error":
        return this.#failed(event.error);
    }
  }

  #answered(id, value, how = "resolve") {
    this.#promised.get(id)?.[how](value);
    this.#promised.delete(id);
    this.#unanswered.delete(id);
    this.#send();
  }

  #failed(problem) {
    const error = new TrioengineError(problem);
    const current = this.#current;
    this.#answered(problem.event_id, error, "reject");
    if (current === null || current.id !== problem.event_id) return;
    current.problem = error;
    if (current.response === null) this.#end(error); // refused; otherwise response.done follows
  }

  #done(response) {
    const current = this.#current;
    if (current === null) return;
    current.response = response;
    this.#end(response.status === "failed" ? (current.problem ?? new TrioengineError(response.status_details.error)) : null);
  }

  #end(error) {
    const current = this.#current;
    this.#current = null;
    current.end(error);
  }

  #lose({ code, reason }) {
    if (this.#loss !== null) return;
    const message = `the connection is closed: ${code} ${reason}`;
    this.#loss = new TrioengineError({ code: code === 1001 ? "shutting_down" : "connection_lost", message });
    for (const { reject } of this.#promised.values()) reject(this.#loss);
    this.#promised.clear();
    if (this.#current !== null) this.#end(this.#loss);
  }
}

/** An answer: an async iterable of its texts. Who stops reading cancels it. */
export class Generation {
  text = ""; // what came until now
  response = null; // the server's last word of it: id, status, status_details, usage
  isOver = false;
  isCancelled = false;
  over; // a promise, kept when the server is done with it
  id = null; // of the event that asked for it
  problem = null;
  #cancel;
  #unread = "";
  #error = null;
  #wake = () => {};
  #finish;

  constructor(cancel) {
    this.#cancel = cancel;
    this.over = new Promise((resolve) => (this.#finish = resolve));
  }

  /** Stop it. What came until then can still be read, and stays in the conversation. */
  cancel() {
    if (this.isOver || this.isCancelled) return;
    this.isCancelled = true;
    this.#cancel(this);
  }

  /** Read to the end: {text, status, usage}. */
  async result() {
    for await (const _ of this);
    return { text: this.text, status: this.response?.status ?? "cancelled", usage: this.response?.usage ?? null };
  }

  async *[Symbol.asyncIterator]() {
    try {
      for (;;) {
        if (this.#unread !== "") {
          const text = this.#unread;
          this.#unread = "";
          yield text;
        } else if (!this.isOver) {
          await new Promise((resolve) => (this.#wake = resolve));
        } else if (this.#error !== null) {
          throw this.#error;
        } else return;
      }
    } finally {
      this.cancel();
    }
  }

  // ---- what its session tells it

  add(text) {
    this.text += text;
    this.#unread += text;
    this.#wake();
  }

  spoil(error) {
    this.#error ??= error;
    this.cancel();
  }

  end(error) {
    this.isOver = true;
    this.#error ??= error;
    this.#wake();
    this.#finish();
  }
}
