/** Recurrent language models in the browser. `recurra export web` writes this module into the folder of the models. */

/**
 * Load a folder that `recurra export web` wrote; it must have the page's origin. Calls with the same folder share one
 * worker, which loads all models of the folder.
 *
 * @param folder its address; by default the folder of this module.
 * @param options.name which model; by default the first one.
 */
export function load(folder?: string | URL, options?: { name?: string }): Promise<Model>;

export interface Model {
  readonly name: string;
  /** How the weights are stored: "int8", "float16" or "float32". */
  readonly weights: string;
  /** Size of a stream's state, however much the stream has read. */
  readonly stateBytes: number;
  /** A new stream, which has read nothing. */
  stream(): Stream;
}

/** One text, read and continued token by token. It runs one call of `feed` or `generate` at a time. */
export interface Stream {
  /** All tokens so far, read and generated. */
  readonly tokens: readonly number[];
  /**
   * Read a text or tokens. At the start of a stream, a text gets the tokens that the model expects before it, which
   * `tokens` then includes; token ids are read as they are.
   */
  feed(input: string | Iterable<number>): Promise<Token[]>;
  /**
   * Generate `n` tokens, one after the other. If the loop over them ends early, the stream stands after the last token
   * that the loop was given. A stream at its start first reads the model's start tokens, which `tokens` then includes.
   */
  generate(n: number, options?: Sampling): AsyncGenerator<Token, void, undefined>;
  /** A new stream after the first `position` tokens, by default all. The two continue independently. */
  fork(position?: number): Stream;
  /** The model's outputs after the last token; null at the start. */
  logits(): Promise<Float32Array | null>;
  /** Their softmax. */
  probabilities(): Promise<Float32Array | null>;
  /** Free the state. The stream must be at rest: end a loop over `generate` first. */
  close(): Promise<void>;
}

/** The settings apply in this order. */
export interface Sampling {
  /** Divides the logits; 0 takes the likeliest token. Default: 1. */
  temperature?: number;
  /** Draw from the k likeliest tokens. Default: all. */
  topK?: number;
  /** Draw from the likeliest tokens that together hold this share of the probability. Default: 1. */
  topP?: number;
  /** From 0 to 2^32 - 1: equal seeds give equal tokens. The tokens are not those of the same seed in Python. */
  seed?: number;
}

export interface Token {
  id: number;
  /** What it adds to the text; empty inside a letter of several bytes. */
  text: string;
  /** In nats, given the tokens before it; null for the first, and for models that answer rather than continue. */
  logprob: number | null;
  /** The likeliest tokens in its place. */
  alternatives: { id: number; text: string; logprob: number }[];
  /** The likeliest outputs after it, of models that answer rather than continue. */
  answers: { id: number; text: string; logprob: number }[];
  /**
   * A byte per channel, for at most 64 evenly spaced channels of each layer: |a| = byte / 255, phase = byte / 256 of a
   * turn; null without transitions.
   */
  gates: { magnitudes: Uint8Array[]; phases: Uint8Array[] } | null;
}
