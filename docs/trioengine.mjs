// A client of trioengine's Realtime protocol, for browsers and for node (22 and newer; older versions need the package ws).
//
//   const session = await connect("ws://localhost:8000");
//   for await (const text of session.generate("Hello!", { max_output_tokens: 64, temperature: 0 })) show(text);
//   await session.close();
//
// A turn is a question and its answer. Turns that ran to their end stay in the conversation; cancelled, failed and refused
// turns are removed. After the loss of its connection a session opens another one for the next question, and sends the
// conversation over it. Errors are thrown as TrioengineError. Types: trioengine.d.ts.

export const VERSION = "0.1.0"; // of the Python package that this file belongs to

const PATH = "/v1/realtime";
const WINDOW = 32; // unanswered events at a time; a server closes the connection at 64
const PROBE_TIMEOUT = 5000; // milliseconds
const OPEN = 1, GOING_AWAY = 1001, TRY_AGAIN_LATER = 1013;
const TOKEN = /^[!#$%&'*+.^_`|~0-9A-Za-z-]+$/; // of a subprotocol (RFC 9110, section 5.6.2)
const OPTIONS = ["apiKey", "model", "history", "keepPartial", "onState", "onLoss", "WebSocket"];
const GENERATION_OPTIONS = ["keepPartial", "media"];
const SIGNATURES = { // first bytes of a file, by media type
  "image/png": /^\x89PNG/,
  "image/jpeg": /^\xff\xd8/,
  "image/gif": /^GIF8/,
  "image/webp": /^RIFF[^]{4}WEBP/,
};
const CLOSES = {
  1000: "the server closed the connection",
  1001: "the server is shutting down",
  1006: "the connection broke off: the server died, or the network failed",
  1008: "the server closed the connection, because too many events were unhandled",
  1009: "the server closed the connection, because a message was too large",
  1013: "the server had no room for a message",
};

/** `code` is the server's, or connection_lost, session_busy, session_ended; `param` the field at fault; `retryAfter` in
 *  seconds; `status` the HTTP status of a refused handshake; `closeCode` the code of a closed WebSocket. */
export class TrioengineError extends Error {
  constructor({ code, message, param = null, retry_after = null, status = null, closeCode = null }) {
    super(message);
    this.name = "TrioengineError";
    Object.assign(this, { code, param, retryAfter: retry_after, status, closeCode });
  }
}

/** Open a session. Throws a TrioengineError with the reason when the server refuses it, or cannot be reached. */
export async function connect(url, options = {}) {
  const session = new Session(url, options);
  await session.open();
  return session;
}

/** A conversation with the server at `url`, with or without /v1, over one WebSocket at a time. It is opened by `open`, by
 *  the first question, or by the first question after a loss. */
export class Session {
  id = null; // the server's id of the latest connection
  #address;
  #options;
  #items; // of the conversation, in order: {id, role, text, isCommitted}, and parts if it has images; or {id, tool, …}
  #parts = new Map(); // of questions with images that the server has not confirmed yet: item id -> parts
  #settings = {};
  #connection = null; // null: not opened yet, or lost
  #opening = null; // the connection that is being opened
  #opened = null; // a promise of it
  #running = null; // the generation that the server is processing
  #latest = null; // the last generation requested
  #count = 0;
  #isClosed = false;

  constructor(url, options = {}) {
    checkNames("Session", options, OPTIONS);
    if ((options.WebSocket ?? globalThis.WebSocket) === undefined) {
      throw new TypeError("no global WebSocket: pass the package ws's class as the option WebSocket");
    }
    if (options.apiKey !== undefined && !TOKEN.test(options.apiKey)) {
      const message = "apiKey has characters that the handshake of a WebSocket cannot carry";
      throw new TrioengineError({ code: "invalid_api_key", message });
    }
    this.#address = addressOf(url, options.model);
    this.#options = options;
    const history = options.history ?? [];
    if (!Array.isArray(history)) throw new TypeError("history must be an array of messages");
    this.#items = history.map((message) => {
      const id = this.#newId("item"), { role, content } = message;
      if (isOfTool(message)) return { id, tool: toolItem(message), isCommitted: true };
      const parts = Array.isArray(content) ? content : null;
      return { id, role, text: textOf(content), parts, isCommitted: true };
    });
  }

  /** The committed conversation as chat messages, and items of tools' calls and outputs; a content with images is a list of
   *  parts with data URLs. */
  get history() {
    const committed = this.#items.filter((item) => item.isCommitted);
    return committed.map(({ role, text, parts, tool }) => tool ?? { role, content: parts ?? text });
  }

  /** Connect, unless connected. Throws a TrioengineError with the reason on failure. */
  async open() {
    if (this.#connection === null) await this.#connected();
  }

  /** Change the settings of the session: instructions, temperature, max_output_tokens, … Returns all of them. */
  async update(settings) {
    const event = { type: "session.update", session: { type: "realtime", ...settings } };
    const changed = await this.#ask(() => [this.#newId("update"), event]);
    this.#settings = { ...this.#settings, ...settings };
    return changed;
  }

  /** Add a message to the conversation. Returns its item. */
  say(text, role = "user") {
    return this.#ask(() => creation({ id: this.#newId("item"), role, text }));
  }

  /** Ask for an answer, to this text, to outputs of tools (`[{ call_id, output }]`), or to the present conversation. Throws session_busy while another question is
   *  unanswered; a cancelled question is waited for. With `keepPartial` the turn stays in the conversation even if it is
   *  cancelled or fails, with the part of the answer that arrived. `media` are images before the text: Blobs,
   *  ArrayBuffers, views of these, or data URLs. Calls of the settings' `tools` are in the result's `tool_calls`. */
  generate(prompt, settings = {}, options = {}) {
    checkNames("generate", options, GENERATION_OPTIONS);
    const { keepPartial = this.#options.keepPartial ?? false, media = [] } = options;
    const previous = this.#latest;
    if (previous !== null && !previous.isOver && !previous.isCancelled) {
      const message = "the session is busy with another question: wait for its answer, or cancel it";
      throw new TrioengineError({ code: "session_busy", message });
    }
    for (const param of ["conversation", "input"].filter((name) => name in settings)) {
      throw new TrioengineError({ code: "unsupported_parameter", message: `${param} is not supported`, param });
    }
    const generation = new Generation(keepPartial, () => this.#cancel(generation));
    this.#latest = generation;
    const start = (questions) => this.#start(generation, questions, settings);
    if (media.length > 0) {
      const questions = questionsOf(prompt, media);
      Promise.all([questions, previous?.over]).then(([questions]) => start(questions), (error) => generation.end(error));
    } else {
      const questions = questionsOfPrompt(prompt);
      if (previous === null || previous.isOver) start(questions);
      else previous.over.then(() => start(questions));
    }
    return generation;
  }

  /** Close the WebSocket for good; a question in progress fails. */
  async close() {
    this.#isClosed = true;
    const connection = this.#connection ?? this.#opening;
    connection?.close(ended());
    await connection?.closed;
  }

  // ---- the connection

  #connected() {
    this.#opened ??= this.#connect().finally(() => {
      this.#opening = this.#opened = null;
    });
    return this.#opened;
  }

  /** Open a connection, and send the settings and the conversation over it. */
  async #connect() {
    if (this.#isClosed) throw ended();
    const connection = this.#dialled();
    this.#opening = connection;
    try {
      this.id = (await connection.opened).id;
      const session = { type: "realtime", ...this.#settings };
      const events = this.#items.map(creation);
      if (Object.keys(this.#settings).length > 0) {
        events.unshift([this.#newId("update"), { type: "session.update", session }]);
      }
      await Promise.all(events.map(([id, event]) => connection.ask(id, event)));
      if (connection.loss !== null) throw connection.loss;
    } catch (error) {
      connection.close(error);
      throw error;
    }
    this.#connection = connection;
    connection.onLoss = (error) => this.#lost(error);
  }

  #dialled() {
    try {
      return new Connection(this.#address, this.#options, (event) => this.#receive(event));
    } catch (error) { // for example, a page over TLS and a server without TLS
      throw refused(`cannot open a WebSocket: ${error.message}`);
    }
  }

  #lost(error) {
    this.#connection = null;
    const generation = this.#running;
    if (generation !== null) this.#finish(generation, error);
    this.#items = this.#items.filter((item) => item.isCommitted);
    if (!this.#isClosed) this.#options.onLoss?.(error);
  }

  /** Send an event, and return a promise of its reply. Keeps the order of calls if the session is connected. */
  #ask(prepare) {
    if (this.#connection !== null) return this.#connection.ask(...prepare());
    return this.#connected().then(() => this.#ask(prepare));
  }

  #newId(kind) {
    return `${kind}_${++this.#count}`;
  }

  // ---- questions

  #start(generation, questions, settings) {
    if (generation.isCancelled) return generation.end(null);
    if (this.#connection === null) {
      const retry = () => this.#start(generation, questions, settings);
      return this.#connected().then(retry, (error) => generation.end(error));
    }
    this.#running = generation;
    for (const question of questions) {
      const id = this.#newId("item");
      generation.itemIds.push(id);
      if (question.parts) this.#parts.set(id, question.parts);
      this.#connection.ask(...creation({ id, ...question })).catch((error) => this.#spoil(generation, error));
    }
    generation.id = this.#newId("ask");
    this.#connection.post(generation.id, { type: "response.create", response: settings });
  }

  /** The server has refused the question, so the response requested with it would answer another one: cancel it. */
  #spoil(generation, error) {
    generation.itemIds.forEach((id) => this.#parts.delete(id));
    generation.fail(error); // even if it is over: without the question there may be nothing to respond to
    if (generation.isOver) this.#takeBack(generation); // the refusal and the whole response came in one piece
    else this.#cancel(generation);
  }

  #cancel(generation) {
    if (generation !== this.#running) return;
    const response = generation.response === null ? {} : { response_id: generation.response.id };
    this.#connection.post(this.#newId("cancel"), { type: "response.cancel", ...response });
  }

  /** Decide whether its turn stays, when the server has finished with it or the connection is lost. */
  #finish(generation, error) {
    this.#running = null;
    if (generation.isKept) this.#commit(generation);
    else this.#takeBack(generation);
    generation.end(error);
  }

  #itemsOf(generation) {
    return this.#items.filter((item) => generation.itemIds.includes(item.id));
  }

  #takeBack(generation) {
    for (const item of this.#itemsOf(generation)) this.#delete(item.id);
  }

  #commit(generation) {
    const items = this.#itemsOf(generation);
    for (const item of items) item.isCommitted = true;
    for (const id of generation.response.dropped_item_ids ?? []) this.#delete(id); // the model no longer sees them
    for (const answer of items) {
      if (answer.isCut) this.#delete(answer.id); // a call without its end
      else if (answer.role === "assistant") this.#truncate(answer, generation.textOf(answer.id));
    }
  }

  /** Keep only the text that arrived before a cancel. */
  #truncate(answer, text) {
    if (answer.text === text) return;
    if (text === "") return this.#delete(answer.id);
    answer.text = text;
    const place = { item_id: answer.id, content_index: 0, text_end: [...text].length };
    this.#connection?.post(`truncate_${answer.id}`, { type: "conversation.item.truncate", ...place });
  }

  #delete(id) {
    this.#items = this.#items.filter((item) => item.id !== id);
    this.#connection?.post(`delete_${id}`, { type: "conversation.item.delete", item_id: id });
  }

  // ---- the server's events

  #receive(event) {
    const running = this.#running;
    const id = event.response_id ?? event.response?.id;
    const isOurs = running !== null && id !== undefined && id === running.response?.id;
    switch (event.type) {
      case "conversation.item.added":
        return this.#add(event.item, event.previous_item_id);
      case "conversation.item.done":
        return this.#complete(event.item);
      case "response.created":
        if (running?.response === null) running.response = event.response;
        return;
      case "response.output_item.added":
        if (isOurs) running.itemIds.push(event.item.id);
        return;
      case "response.output_text.delta":
        if (isOurs) running.add(event.delta, event.item_id);
        return;
      case "response.done":
        if (isOurs) this.#done(running, event.response);
        return;
      case "engine.state":
        return this.#options.onState?.(event.state);
      case "error":
        if (running !== null && event.error.event_id === running.id) this.#refused(running, event.error);
    }
  }

  #add(item, previous) {
    const { id, role } = item;
    if (this.#items.some((item) => item.id === id)) return; // sent again after a loss
    const index = this.#items.findIndex((item) => item.id === previous) + 1;
    const content = isOfTool(item)
      ? { tool: toolItem(item) }
      : { role, text: "", parts: this.#parts.get(id) ?? null };
    this.#items.splice(index, 0, { id, ...content, isCommitted: false });
    this.#parts.delete(id);
  }

  #complete(completed) {
    const { id, content } = completed;
    const item = this.#items.find((item) => item.id === id);
    if (item === undefined || item.isCommitted) return;
    if (isOfTool(completed)) {
      item.tool = toolItem(completed);
      item.isCut = completed.status === "incomplete";
    } else item.text = textOf(content);
    item.isCommitted = !this.#running?.itemIds.includes(id);
  }

  #refused(generation, problem) {
    generation.problem = new TrioengineError(problem);
    if (generation.response === null) this.#finish(generation, generation.problem); // else response.done follows
  }

  #done(generation, response) {
    generation.response = response;
    const hasFailed = response.status === "failed";
    const error = hasFailed ? (generation.problem ?? new TrioengineError(response.status_details.error)) : null;
    this.#finish(generation, error);
  }
}

/** An answer: an async iterable of its texts. Leaving the loop early cancels it. */
export class Generation {
  text = ""; // the text so far, read or not
  response = null; // the server's latest description: id, status, status_details, usage
  isOver = false;
  isCancelled = false;
  over; // a promise, resolved when the server has finished with it
  // Written only by the session:
  id = null; // of the event that requested it
  itemIds = []; // of the turn: the question's, the answer's
  problem = null; // of the error event about it
  #keepPartial;
  #onCancel;
  #texts = new Map(); // item id -> its text
  #unread = "";
  #error = null;
  #isSpoiled = false;
  #changed = signal();
  #finished = signal();

  constructor(keepPartial, onCancel) {
    this.#keepPartial = keepPartial;
    this.#onCancel = onCancel;
    this.over = this.#finished.promise;
  }

  /** Stop it: nothing more is read, and its turn is removed from the conversation (unless `keepPartial`). */
  cancel() {
    if (this.isOver || this.isCancelled) return;
    this.isCancelled = true;
    this.#unread = "";
    this.#notify();
    this.#onCancel();
  }

  /** The whole calls of tools in the answer, when it is over: [{call_id, name, arguments}]; the arguments are JSON. */
  get tool_calls() {
    const calls = this.response?.output.filter(({ type, status }) => type === "function_call" && status === "completed");
    return (calls ?? []).map(({ call_id, name, arguments: json }) => ({ call_id, name, arguments: json }));
  }

  /** Read to the end: {text, tool_calls, status, usage, droppedTurns}. */
  async result() {
    for await (const _ of this);
    await this.over;
    const status = this.isCancelled ? "cancelled" : this.response.status;
    const { usage = null, dropped_turns: droppedTurns = 0 } = this.response ?? {};
    return { text: this.text, tool_calls: this.tool_calls, status, usage, droppedTurns };
  }

  async *[Symbol.asyncIterator]() {
    try {
      for (;;) {
        if (this.#unread !== "") {
          const text = this.#unread;
          this.#unread = "";
          yield text;
        } else if (this.isCancelled) return;
        else if (this.#error !== null) throw this.#error;
        else if (this.isOver) return;
        else await this.#changed.promise;
      }
    } finally {
      this.cancel();
    }
  }

  // ---- called by its session

  get isKept() {
    if (this.#isSpoiled) return false;
    const isWhole = ["completed", "incomplete"].includes(this.response?.status) && !this.isCancelled;
    return isWhole || (this.#keepPartial && this.text !== "");
  }

  textOf(itemId) {
    return this.#texts.get(itemId) ?? "";
  }

  add(text, itemId) {
    if (this.isCancelled || this.#isSpoiled) return;
    this.text += text;
    this.#texts.set(itemId, this.textOf(itemId) + text);
    this.#unread += text;
    this.#notify();
  }

  fail(error) {
    this.#isSpoiled = true;
    this.#error = error;
    this.#notify();
  }

  end(error) {
    this.isOver = true;
    this.#error ??= error;
    this.#notify();
    this.#finished.resolve();
  }

  #notify() {
    this.#changed.resolve();
    this.#changed = signal();
  }
}

/** One WebSocket, from its handshake to its close. */
class Connection {
  opened; // a promise of the session in the server's first event
  closed; // a promise, resolved when the WebSocket is closed
  loss = null; // the error that ended it
  onLoss = () => {};
  #socket;
  #onEvent;
  #promised = new Map(); // event id -> resolve and reject of its reply
  #unsent = [];
  #unanswered = new Set(); // event ids
  #problem = null; // the latest error without an event id: the server dropped a message, and will close

  constructor(address, { apiKey, model, WebSocket = globalThis.WebSocket }, onEvent) {
    const protocols = ["realtime"]; // browsers cannot set headers of a WebSocket, so the key goes here
    if (apiKey !== undefined) protocols.push(`openai-insecure-api-key.${apiKey}`);
    const socket = (this.#socket = new WebSocket(address.href, protocols));
    this.#onEvent = onEvent;
    this.opened = this.#promise("open");
    let hasOpened = false;
    socket.addEventListener("open", () => (hasOpened = true));
    socket.addEventListener("message", (message) => this.#receive(JSON.parse(message.data)));
    const over = new Promise((resolve) => {
      socket.addEventListener("close", resolve);
      socket.addEventListener("error", () => resolve({ code: 1006, reason: "" }));
    });
    this.closed = over.then(async (close) => {
      this.#lose(hasOpened || this.loss !== null ? lossOf(close, this.#problem) : await refusalOf(address, apiKey, model));
    });
  }

  /** Send an event when its turn comes. */
  post(id, event) {
    if (this.loss !== null) return;
    this.#unsent.push([id, JSON.stringify({ event_id: id, ...event })]);
    queueMicrotask(() => this.#send());
  }

  /** Send an event, and return a promise of its reply. */
  ask(id, event) {
    if (this.loss !== null) return Promise.reject(this.loss);
    this.post(id, event);
    return this.#promise(id);
  }

  /** Close it with this reason. */
  close(error) {
    this.#lose(error);
    this.#socket.close(1000);
  }

  #promise(id) {
    return new Promise((resolve, reject) => this.#promised.set(id, { resolve, reject }));
  }

  #send() {
    while (this.#unsent.length > 0 && this.#unanswered.size < WINDOW && this.#socket.readyState === OPEN) {
      const [id, text] = this.#unsent.shift();
      if (!/^(ask|cancel)_/.test(id)) this.#unanswered.add(id); // the others have one reply each
      this.#socket.send(text);
    }
  }

  #receive(event) {
    if (this.loss !== null) return;
    this.#onEvent(event);
    switch (event.type) {
      case "session.created":
        return this.#answered("open", event.session);
      case "session.updated": // replies come in the order of the events
        return this.#answered([...this.#unanswered].find((id) => id.startsWith("update_")), event.session);
      case "conversation.item.done":
        return this.#answered(`create_${event.item.id}`, event.item);
      case "conversation.item.truncated":
        return this.#answered(`truncate_${event.item_id}`);
      case "conversation.item.deleted":
        return this.#answered(`delete_${event.item_id}`);
      case "error":
        if (event.error.event_id === null) this.#problem = event.error;
        return this.#answered(event.error.event_id, new TrioengineError(event.error), "reject");
    }
  }

  #answered(id, value, how = "resolve") {
    this.#promised.get(id)?.[how](value);
    this.#promised.delete(id);
    this.#unanswered.delete(id);
    this.#send();
  }

  #lose(error) {
    if (this.loss !== null) return;
    this.loss = error;
    for (const { reject } of this.#promised.values()) reject(error);
    this.#promised.clear();
    this.onLoss(error);
  }
}

function checkNames(call, options, known) {
  const unknown = Object.keys(options).find((name) => !known.includes(name));
  if (unknown === undefined) return;
  throw new TypeError(`${call} has no option ${unknown}; its options are ${known.join(", ")}`);
}

function addressOf(url, model) {
  if (!/^(ws|http)s?:\/\/./.test(url)) throw new TypeError(`url must be like ws://localhost:8000, got ${url}`);
  const address = new URL(String(url).replace(/^http/, "ws"));
  if (["", "/v1"].includes(address.pathname.replace(/\/$/, ""))) address.pathname = PATH;
  if (model !== undefined) address.searchParams.set("model", model);
  return address;
}

/** Return the event that creates this item, with its id. */
function creation({ id, role, text, parts, tool }) {
  if (tool !== undefined) return [`create_${id}`, { type: "conversation.item.create", item: { id, ...tool } }];
  const type = role === "assistant" ? "output_text" : "input_text";
  const content = (parts ?? [{ type: "text", text }]).map((part) =>
    part.type === "text" ? { type, text: part.text } : { type: "input_image", image_url: part.image_url.url });
  return [`create_${id}`, { type: "conversation.item.create", item: { id, type: "message", role, content } }];
}

/** Return the text of a message's content. */
function textOf(content) {
  return typeof content === "string" ? content : content.map((part) => part.text ?? "").join("");
}

function isOfTool({ type }) {
  return type === "function_call" || type === "function_call_output";
}

/** Return the members of a call, or of the output of one, that make it up. */
function toolItem({ type, call_id, name, arguments: json, output }) {
  return type === "function_call" ? { type, call_id, name, arguments: json } : { type, call_id, output };
}

/** Return the items of a question: a message, outputs of tools, or none. */
function questionsOfPrompt(prompt) {
  if (prompt === undefined) return [];
  if (!Array.isArray(prompt)) return [{ role: "user", text: prompt, parts: null }];
  return prompt.map((output) => ({ tool: toolItem({ ...output, type: "function_call_output" }) }));
}

/** Return the items of a question with images; behind outputs of tools the images are a message of their own. */
async function questionsOf(prompt, media) {
  if (!Array.isArray(prompt)) return [{ role: "user", text: prompt, parts: await partsOf(media, prompt) }];
  return [...questionsOfPrompt(prompt), { role: "user", parts: await partsOf(media) }];
}

/** Return the parts of a question: its images, then its text. */
async function partsOf(media, text) {
  const urls = await Promise.all([...media].map(dataUrl));
  const images = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return text === undefined ? images : [...images, { type: "text", text }];
}

async function dataUrl(image, index) {
  if (typeof image === "string" && image.startsWith("data:")) return image;
  const isBlob = typeof Blob !== "undefined" && image instanceof Blob;
  const data = isBlob ? await image.arrayBuffer() : image;
  if (!(data instanceof ArrayBuffer || ArrayBuffer.isView(data))) {
    const message = `media[${index}] must be a Blob, an ArrayBuffer or a data URL`;
    throw new TrioengineError({ code: "invalid_value", message, param: `media[${index}]` });
  }
  const bytes = ArrayBuffer.isView(data) ? new Uint8Array(data.buffer, data.byteOffset, data.byteLength) : new Uint8Array(data);
  const pieces = [];
  for (let at = 0; at < bytes.length; at += 0x8000) pieces.push(String.fromCharCode(...bytes.subarray(at, at + 0x8000)));
  const text = pieces.join("");
  const type = Object.keys(SIGNATURES).find((type) => SIGNATURES[type].test(text)) ?? "application/octet-stream";
  return `data:${type};base64,${btoa(text)}`;
}

function signal() {
  let resolve;
  const promise = new Promise((done) => (resolve = done));
  return { promise, resolve };
}

function ended() {
  return new TrioengineError({ code: "session_ended", message: "the session was closed" });
}

/** Return the error for an open WebSocket that was closed. */
function lossOf({ code, reason }, problem) {
  const message = `${CLOSES[code] ?? "the connection was closed"} (close code ${code}${reason && `: ${reason}`})`;
  const retry_after = code === TRY_AGAIN_LATER ? problem?.retry_after : null;
  const name = code === GOING_AWAY ? "shutting_down" : "connection_lost";
  return new TrioengineError({ code: name, message, retry_after, closeCode: code });
}

/** Return the error for a failed handshake. Browsers hide its status, so a request over HTTP finds the same refusal. */
async function refusalOf(address, apiKey, model) {
  const url = new URL(address.href.replace(/^ws/, "http"));
  url.pathname = url.pathname.replace(/realtime$/, "models");
  url.search = "";
  const headers = apiKey === undefined ? {} : { authorization: `Bearer ${apiKey}` };
  const options = () => ({ cache: "no-store", signal: AbortSignal.timeout(PROBE_TIMEOUT) });
  try {
    const response = await fetch(url, { headers, ...options() });
    return refusalBy(response.status, await response.json().catch(() => ({})), model);
  } catch {
    const isThere = await fetch(url, { mode: "no-cors", ...options() }).then(() => true, () => false);
    return refused(isThere ? unreadable(address) : `no server answers at ${address.host}`);
  }
}

function refusalBy(status, { error, data }, model) {
  if (status >= 400) {
    const reason = error?.message?.replace(/, in the header .*/, ": the option apiKey") ?? "no reason given";
    const message = `the server refuses the connection: ${reason} (HTTP status ${status})`;
    return refused(message, { ...error, status });
  }
  const names = data?.map(({ id }) => id) ?? [];
  if (model !== undefined && names.length > 0 && !names.includes(model)) {
    const message = `model '${model}' not found; this server serves '${names.join("', '")}'`;
    return refused(message, { code: "model_not_found", param: "model", status: 404 });
  }
  return refused("the handshake of the WebSocket failed, though the server answers over HTTP");
}

/** Return the message for a server whose answer the browser hides, because the server does not allow the page's origin. */
function unreadable(address) {
  const origin = globalThis.location?.origin;
  return `${address.host} refuses the connection: it does not allow pages of ${origin} (its option --allowed-origin), or it has no free connection`;
}

function refused(message, details = {}) {
  return new TrioengineError({ code: "connection_lost", ...details, message });
}
