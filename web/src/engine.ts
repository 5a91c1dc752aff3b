/** What runs models: a server, or this page itself. The views know nothing but these interfaces. */

export type Task =
  /** `start` begins a stream that is given nothing to read; `before` stands in front of a text that begins one. */
  | { kind: "text"; start: number[]; before?: number[]; examples?: string[] }
  | { kind: "memory-horizon"; largest: number; reset: number; modulus: number };

/** A layer with transitions: how many of its channels a step has, or, on a server, how many there are. */
export interface GateLayer {
  layer: number;
  channels: number;
}

export interface Model {
  name: string;
  task: Task;
  weights: string;
  /** After the first token. */
  stateBytes: number;
  /** What each further token adds, up to a number of tokens, or without end. */
  stateGrowth: { bytes: number; tokens: number | null }[];
  /** Of a Transformer with as many layers and channels, in float16. */
  cacheBytesPerToken: number;
  gates: GateLayer[];
}

/**
 * |a| and phase of a token, a byte for each shown channel of each layer (at most MOST_CHANNELS, evenly spaced):
 * |a| = byte / 255, phase = byte / 256 of a turn.
 */
export interface Gates {
  magnitudes: Uint8Array[];
  phases: Uint8Array[];
}

/** An output of the model, and its log-probability in nats. */
export interface Share {
  id: number;
  text: string;
  logprob: number;
}

/** A token that a stream read or wrote. */
export interface Step {
  id: number;
  /** What it adds to the text; empty inside a letter of several bytes. */
  text: string;
  wasRead: boolean;
  /** In nats, of the token given those before it; null for the first. */
  logprob: number | null;
  /** The likeliest tokens in its place. */
  alternatives: Share[];
  /** The likeliest outputs after it, for models that answer rather than continue. */
  answers: Share[];
  gates: Gates | null;
}

export interface Sampling {
  maxTokens: number;
  temperature: number;
  topP: number;
  topK?: number;
  seed?: number;
}

export type Input = { text: string } | { tokens: number[] };

/** What it takes to find a stream again after the page was closed. */
export interface Kept {
  /** A session on a server. */
  session?: string;
  /** The tensors of a state in this page, and the logits after the last token. */
  tensors?: Float32Array[];
  logits?: Float32Array;
  /** How many tokens that state has read. */
  position?: number;
  /** The SHA-256 of the model that computed it. */
  digest?: string;
}

export interface Stream {
  feed(input: Input, signal: AbortSignal): AsyncGenerator<Step[]>;
  generate(sampling: Sampling, signal: AbortSignal): AsyncGenerator<Step[]>;
  /** A new stream that continues after the first `position` tokens of this one. */
  fork(position: number): Promise<Stream>;
  /** Make the stream stand after exactly these tokens, whatever was lost on the way. */
  settle(tokens: number[]): Promise<void>;
  keep(): Promise<Kept>;
  close(): Promise<void>;
}

export interface Engine {
  kind: "server" | "local";
  models: Model[];
  /** One line on where the model runs. */
  place: string;
  open(model: Model): Promise<Stream>;
  /** Find a stream that was kept; `tokens` are all that it has read. */
  resume(model: Model, kept: Kept, tokens: number[]): Promise<Stream>;
}

/** The engine cannot be reached now, and may be later. */
export class Unreachable extends Error {}

/** Another page has used the stream, so what was kept no longer finds it. */
export class Moved extends Unreachable {}

/** Most channels of a layer that are shown. */
export const MOST_CHANNELS = 64;
export const N_ALTERNATIVES = 5;
export const N_ANSWERS = 3;
