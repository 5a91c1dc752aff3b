/** A stream through a model that runs in the page: a state of constant size, and a few of its earlier states. */

import type { Gates, Kept, Model, Sampling, Share, Step } from "../engine";
import { N_ALTERNATIVES, N_ANSWERS } from "../engine";
import { choose, largest, normaliser } from "./choosing";
import type { TextEncoder } from "./tokenizer";
import { TextPieces } from "./tokenizer";

/** What the model computes of one token. */
export interface Outputs {
  logits: Float32Array;
  magnitudes: Float32Array;
  phases: Float32Array;
  state: Float32Array[];
}

export interface Runner {
  model: Model;
  /** The SHA-256 of its file: a state of another model means something else. */
  digest: string;
  tokenizer: TextEncoder | null;
  start(): Float32Array[];
  run(token: number, state: Float32Array[]): Promise<Outputs>;
}

interface Place {
  position: number;
  state: Float32Array[];
  logits: Float32Array | null;
  /** log(sum(exp(logits))), computed when it is first needed. */
  total?: number;
}

const MOST_MARKS = 64;

export class LocalStream {
  tokens: number[] = [];
  private place: Place;
  private marks: Place[];
  private markEvery = 8;
  private pieces: TextPieces | null = null;

  constructor(private readonly runner: Runner) {
    this.place = { position: 0, state: runner.start(), logits: null };
    this.marks = [this.place];
  }

  /** A stream that continues from what `kept` returned. */
  static resumed(runner: Runner, tokens: number[], state: Float32Array[], logits: Float32Array | null): LocalStream {
    const stream = new LocalStream(runner);
    stream.tokens = tokens.slice(); // not push(...tokens): arguments go onto the stack, which long streams exceed
    stream.place = { position: tokens.length, state, logits };
    stream.marks.push(stream.place);
    return stream;
  }

  kept(): Kept {
    const { state: tensors, logits, position } = this.place;
    return { tensors, logits: logits ?? undefined, position, digest: this.runner.digest };
  }

  encode(text: string): number[] {
    if (!this.runner.tokenizer) throw new Error(`${this.runner.model.name} has no tokenizer; expected tokens`);
    const tokens = this.runner.tokenizer.encode(text);
    const { task } = this.runner.model;
    const before = task.kind === "text" ? (task.before ?? []) : [];
    const begins = this.place.position === 0 && tokens.length > 0;
    return begins && before.some((token, place) => token !== tokens[place]) ? [...before, ...tokens] : tokens;
  }

  async read(token: number, wasRead = true): Promise<Step> {
    const { model, tokenizer } = this.runner;
    if (!(token >= 0)) throw new Error(`the token is ${token}; expected one of the vocabulary`);
    const before = model.task.kind === "text" && this.place.logits ? this.place : null;
    const outputs = await this.runner.run(token, this.place.state);
    if (tokenizer && !this.pieces) this.pieces = new TextPieces(tokenizer, this.tokens);
    this.tokens.push(token);
    this.place = { position: this.place.position + 1, state: outputs.state, logits: outputs.logits };
    this.mark();
    return {
      id: token,
      text: this.pieces ? this.pieces.add(token) : String(token),
      wasRead,
      logprob: before ? before.logits![token] - totalOf(before) : null,
      alternatives: before ? this.shares(before, N_ALTERNATIVES) : [],
      answers: model.task.kind === "text" ? [] : this.shares(this.place, N_ANSWERS),
      gates: gatesOf(model, outputs),
    };
  }

  write(sampling: Sampling, random: () => number): Promise<Step> {
    if (!this.place.logits) throw new Error("the stream is at its start; expected one that has read something");
    return this.read(choose(this.place.logits, sampling, random), false);
  }

  /** A new stream after the first `position` tokens: from the nearest state that was kept, and the tokens after it. */
  async fork(position: number): Promise<LocalStream> {
    const twin = new LocalStream(this.runner);
    const marks = [...this.marks, this.place].filter((mark) => mark.position <= position);
    const nearest = marks.reduce((one, other) => (other.position > one.position ? other : one));
    twin.tokens = this.tokens.slice(0, nearest.position);
    twin.place = nearest;
    twin.marks = marks.filter((mark) => mark.position < nearest.position).concat(nearest);
    twin.markEvery = this.markEvery;
    for (const token of this.tokens.slice(nearest.position, position)) await twin.read(token);
    return twin;
  }

  /** Keep some of the states for forks: evenly spaced, and a bounded number of them however long the stream is. */
  private mark(): void {
    if (this.place.position % this.markEvery) return;
    this.marks.push(this.place);
    if (this.marks.length > MOST_MARKS) {
      this.markEvery *= 2;
      this.marks = this.marks.filter((mark) => mark.position % this.markEvery === 0);
    }
  }

  private shares(place: Place, count: number): Share[] {
    const logits = place.logits!;
    const total = totalOf(place);
    const { tokenizer, model } = this.runner;
    const text = (id: number) => (tokenizer && model.task.kind === "text" ? tokenizer.decode([id]) : String(id));
    return largest(logits, count).map((id) => ({ id, text: text(id), logprob: logits[id] - total }));
  }
}

function totalOf(place: Place): number {
  return (place.total ??= normaliser(place.logits!));
}

/** The channels of every layer, as bytes. */
function gatesOf(model: Model, outputs: Outputs): Gates | null {
  if (!model.gates.length) return null;
  const gates: Gates = { magnitudes: [], phases: [] };
  let first = 0;
  for (const { channels } of model.gates) {
    const end = first + channels;
    const turns = (phase: number) => Math.round((256 * phase) / (2 * Math.PI)) & 255;
    gates.magnitudes.push(Uint8Array.from(outputs.magnitudes.subarray(first, end), (value) => Math.round(255 * Math.min(1, value))));
    gates.phases.push(Uint8Array.from(outputs.phases.subarray(first, end), turns));
    first = end;
  }
  return gates;
}
