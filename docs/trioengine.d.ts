// Types of trioengine.mjs. TypeScript finds them under the name trioengine.d.mts beside it.

/** The version of the Python package that this client belongs to. */
export const VERSION: string;

export type Role = "system" | "user" | "assistant";
export type EngineState = "awake" | "sleeping" | "updating" | "loading" | "restarting" | "draining";
export type Status = "completed" | "incomplete" | "cancelled" | "failed" | "in_progress";

export interface TextPart {
  type: "text";
  text: string;
}

export interface ImagePart {
  type: "image_url";
  /** A data URL of a PNG, JPEG, WebP or GIF image. */
  image_url: { url: string };
}

export interface Message {
  role: Role;
  /** A list of parts if it has images, which only user messages have. */
  content: string | (TextPart | ImagePart)[];
}

/** A function that the model may call. */
export interface Tool {
  type: "function";
  name: string;
  description?: string | null;
  /** A JSON Schema of an object. */
  parameters?: Record<string, unknown> | null;
}

export type ToolChoice = "auto" | "none" | "required" | { type: "function"; name: string };

export interface ToolCall {
  call_id: string;
  name: string;
  /** JSON of an object. */
  arguments: string;
}

/** The output of a call, for `generate`. */
export interface ToolOutput {
  call_id: string;
  output: string;
}

/** An entry of a conversation. */
export type Entry = Message | ({ type: "function_call" } & ToolCall) | ({ type: "function_call_output" } & ToolOutput);

/** The bytes of an image's file, or its data URL. */
export type Media = Blob | ArrayBuffer | ArrayBufferView | string;

/** Settings of a session, or of one response; others are refused by name. */
export interface Settings {
  instructions?: string | null;
  max_output_tokens?: number | "inf" | null;
  temperature?: number | null;
  top_p?: number | null;
  top_k?: number | null;
  min_p?: number | null;
  repetition_penalty?: number | null;
  presence_penalty?: number | null;
  frequency_penalty?: number | null;
  seed?: number | null;
  stop?: string | string[] | null;
  stop_token_ids?: number[] | null;
  min_tokens?: number | null;
  ignore_eos?: boolean | null;
  logit_bias?: Record<string, number> | null;
  skip_special_tokens?: boolean | null;
  cache_salt?: string | null;
  num_speculative_tokens?: number | null;
  tools?: Tool[] | null;
  tool_choice?: ToolChoice | null;
  parallel_tool_calls?: boolean | null;
  /** For a conversation that outgrows the context: leave out the oldest turns, or refuse. */
  truncation?: "auto" | "disabled" | { type: "retention_ratio"; retention_ratio: number } | null;
}

export interface ResponseSettings extends Settings {
  metadata?: Record<string, string> | null;
}

export interface SessionSettings extends Settings {
  id: string;
  model: string;
  [name: string]: unknown;
}

export interface Usage {
  total_tokens: number;
  input_tokens: number;
  output_tokens: number;
  input_token_details: { cached_tokens: number; text_tokens: number };
  output_token_details: { text_tokens: number };
}

export interface Item {
  id: string;
  type: "message";
  status: "in_progress" | "completed" | "incomplete";
  role: Role;
  content: { type: string; text?: string; image_url?: null }[];
}

export interface CallItem extends ToolCall {
  id: string;
  type: "function_call";
  status: "in_progress" | "completed" | "incomplete";
}

/** The server's description of a response. */
export interface Response {
  id: string;
  status: Status;
  status_details: { type: string; reason?: string; error?: { type: string; code: string; message: string } } | null;
  output: (Item | CallItem)[];
  usage: Usage | null;
  [name: string]: unknown;
}

export interface Result {
  text: string;
  /** The whole calls of tools in the answer. */
  tool_calls: ToolCall[];
  status: Status;
  usage: Usage | null;
  /** How many of the oldest turns were left out of the prompt. */
  droppedTurns: number;
}

export interface GenerationOptions {
  /** Keep the turn in the conversation even if it is cancelled or fails, with the part of the answer that arrived. */
  keepPartial?: boolean;
  /** Images before the text. */
  media?: Media[];
}

export interface Options extends Pick<GenerationOptions, "keepPartial"> {
  apiKey?: string;
  /** The name of the model that the server must serve. */
  model?: string;
  /** Messages to begin the conversation with. */
  history?: Entry[];
  /** Called when the state of the server's engine changes. */
  onState?: (state: EngineState) => void;
  /** Called when the connection is lost. */
  onLoss?: (error: TrioengineError) => void;
  /** The class to use if there is no global WebSocket, such as the package ws's. */
  WebSocket?: new (url: string, protocols: string[]) => any;
}

export class TrioengineError extends Error {
  constructor(details: {
    code: string;
    message: string;
    param?: string | null;
    retry_after?: number | null;
    status?: number | null;
    closeCode?: number | null;
  });
  /** The server's code, or connection_lost, session_busy, session_ended. */
  code: string;
  /** The field at fault. */
  param: string | null;
  /** Seconds after which to try again. */
  retryAfter: number | null;
  /** The HTTP status of a refused handshake, where it is known. */
  status: number | null;
  /** The code of the close of the WebSocket that was lost. */
  closeCode: number | null;
}

/** Open a session. Throws a TrioengineError with the reason when the server refuses it, or cannot be reached. */
export function connect(url: string, options?: Options): Promise<Session>;

export class Session {
  constructor(url: string, options?: Options);
  /** The server's id of the latest connection. */
  readonly id: string | null;
  /** The committed conversation. */
  readonly history: Entry[];
  open(): Promise<void>;
  update(settings: Settings): Promise<SessionSettings>;
  say(text: string, role?: Role): Promise<Item>;
  generate(prompt?: string | ToolOutput[], settings?: ResponseSettings, options?: GenerationOptions): Generation;
  close(): Promise<void>;
}

export class Generation implements AsyncIterable<string> {
  private constructor();
  /** The text so far, read or not. */
  readonly text: string;
  /** The server's latest description of the response. */
  readonly response: Response | null;
  /** The whole calls of tools in the answer, when it is over. */
  readonly tool_calls: ToolCall[];
  /** Whether the server has finished with it. */
  readonly isOver: boolean;
  readonly isCancelled: boolean;
  /** Resolved when the server has finished with it. */
  readonly over: Promise<void>;
  cancel(): void;
  result(): Promise<Result>;
  [Symbol.asyncIterator](): AsyncGenerator<string, void, void>;
}
