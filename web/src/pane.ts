/** A stream as the page shows it: its tokens, what is known of them, and what is going on. */

import { visible } from "./dom";
import type { Engine, Input, Kept, Model, Sampling, Step, Stream } from "./engine";
import { Moved, Unreachable } from "./engine";
import type { StoredPane } from "./store";
import { removePane, savePane } from "./store";

export const MOST_STEPS = 2000;
const SAVED_MS = 2000;

export type Status = "ready" | "reading" | "writing" | "waiting" | "failed";

export interface Origin {
  letter: string;
  position: number;
}

export class Pane {
  stream: Stream | null = null;
  tokens: number[] = [];
  /** The last tokens with all that is known of them. */
  steps: Step[] = [];
  status: Status = "ready";
  message = "";
  /** Tokens a second of the last turn. */
  rate = 0;
  /** The token that is looked at, by its number from 0. */
  selected: number | null = null;
  private kept: Kept = {};
  private turn: AbortController | null = null;
  private going: Promise<boolean> = Promise.resolve(true);
  private reconnecting: Promise<void> | null = null;
  private isClosed = false;
  private savedAt = 0;
  private readonly listeners = new Set<() => void>();

  constructor(
    private readonly engine: Engine,
    readonly id: string,
    readonly letter: string,
    readonly model: Model,
    readonly origin: Origin | null,
  ) {}

  /** The number of the first token that is shown. */
  get first(): number {
    return this.tokens.length - this.steps.length;
  }

  get isBusy(): boolean {
    return this.status === "reading" || this.status === "writing";
  }

  get isShowingTheEnd(): boolean {
    return this.selected === null;
  }

  stepAt(position: number | null): Step | null {
    return position === null ? null : (this.steps[position - this.first] ?? null);
  }

  /** The character that a token is a part of, and the first and last of its tokens: bytes have tokens of their own. */
  characterAt(position: number): { text: string; first: number; last: number } {
    let [first, last] = [position, position];
    while (this.stepAt(first - 1)?.text === "") first--;
    while (this.stepAt(last)?.text === "" && this.stepAt(last + 1)) last++;
    return { text: this.stepAt(last)?.text ?? "", first, last };
  }

  /** What the page calls a token of a text. */
  nameAt(position: number): string {
    const { text, first, last } = this.characterAt(position);
    if (first === last) return visible(text);
    return `${text ? visible(text) : "…"}, part ${position - first + 1} of ${last - first + 1}`;
  }

  onChange(listener: () => void): void {
    this.listeners.add(listener);
  }

  changed(): void {
    for (const listener of this.listeners) listener();
  }

  select(position: number | null): void {
    const last = this.tokens.length - 1;
    this.selected = position === null || last < 0 ? null : Math.min(last, Math.max(this.first, position));
    this.changed();
  }

  /** Whether all of it was read: the turn neither failed nor was stopped. */
  feed(input: Input): Promise<boolean> {
    return this.run("reading", (stream, signal) => stream.feed(input, signal));
  }

  generate(sampling: Sampling): Promise<boolean> {
    return this.run("writing", (stream, signal) => stream.generate(sampling, signal));
  }

  stop(): void {
    this.turn?.abort();
  }

  /** End the stream, once its turn or its way back is over, and forget it. */
  async close(): Promise<void> {
    this.isClosed = true;
    this.stop();
    await this.going;
    await this.reconnecting; // it may find another stream than the one before
    await removePane(this.id).catch(() => undefined);
    await this.stream?.close().catch(() => undefined);
  }

  private run(
    status: Status,
    start: (stream: Stream, signal: AbortSignal) => AsyncGenerator<Step[]>,
  ): Promise<boolean> {
    if (this.isBusy || this.isClosed || this.status === "waiting") return Promise.resolve(false);
    this.going = this.running(status, start);
    return this.going;
  }

  private async running(
    status: Status,
    start: (stream: Stream, signal: AbortSignal) => AsyncGenerator<Step[]>,
  ): Promise<boolean> {
    const hasFailed = this.status === "failed";
    this.turn = new AbortController();
    this.become(status);
    const began = performance.now();
    let count = 0;
    try {
      if (hasFailed) await this.settle(); // the stream may stand elsewhere than what is shown, or be gone
      for await (const steps of start(this.stream!, this.turn.signal)) {
        this.add(steps);
        count += steps.length;
        this.rate = (1000 * count) / Math.max(1, performance.now() - began);
        if (performance.now() - this.savedAt > SAVED_MS) void this.save();
      }
      const wasStopped = this.turn.signal.aborted;
      await this.ended();
      return !wasStopped;
    } catch (error) {
      await this.failed(error);
      return false;
    } finally {
      this.turn = null;
    }
  }

  /** Bring the stream to what is shown; if that is refused, find or open another one that stands there. */
  private async settle(): Promise<void> {
    try {
      if (this.stream) return await this.stream.settle(this.tokens);
    } catch (error) {
      if (error instanceof Unreachable) throw error;
    }
    this.stream = await this.engine.resume(this.model, this.kept, this.tokens);
    this.kept = await this.stream.keep();
  }

  /** Bring the engine to what is shown, if the turn was stopped, and keep everything before the stream is ready. */
  private async ended(): Promise<void> {
    if (this.isClosed) return;
    if (this.turn?.signal.aborted) await this.settle();
    this.kept = await this.stream!.keep();
    await this.save();
    this.become("ready");
  }

  private async failed(error: unknown): Promise<void> {
    if (this.isClosed) return;
    if (error instanceof Moved) this.kept = {};
    void this.save();
    if (error instanceof Unreachable) return this.become("waiting", error.message);
    if (this.turn?.signal.aborted) {
      try {
        return await this.ended();
      } catch (second) {
        if (second instanceof Unreachable) return this.become("waiting", second.message);
        error = second;
      }
    }
    this.become("failed", error instanceof Error ? error.message : String(error));
  }

  /** Continue after the engine was out of reach, from exactly the tokens that are shown; once, however often it is asked. */
  async reconnect(): Promise<void> {
    if (this.status !== "waiting") return;
    this.reconnecting ??= this.reconnected().finally(() => (this.reconnecting = null));
    await this.reconnecting;
  }

  private async reconnected(): Promise<void> {
    try {
      this.stream = await this.engine.resume(this.model, this.kept, this.tokens);
      await this.ended();
    } catch (error) {
      const isOut = error instanceof Unreachable;
      this.become(isOut ? "waiting" : "failed", error instanceof Error ? error.message : String(error));
    }
  }

  private add(steps: Step[]): void {
    for (const step of steps) this.tokens.push(step.id);
    this.steps.push(...steps);
    if (this.steps.length > MOST_STEPS) this.steps.splice(0, this.steps.length - MOST_STEPS);
    if (this.selected !== null && this.selected < this.first) this.selected = null;
    this.changed();
  }

  private become(status: Status, message = ""): void {
    this.status = status;
    this.message = message;
    this.changed();
  }

  /** Begin with a stream that stands after these tokens. */
  begin(stream: Stream, kept: Kept, tokens: number[] = [], steps: Step[] = []): void {
    this.stream = stream;
    this.kept = kept;
    this.tokens = tokens;
    this.steps = steps;
  }

  async save(): Promise<void> {
    if (this.isClosed) return;
    this.savedAt = performance.now();
    const { id, letter, origin, tokens, steps, kept } = this;
    const stored: StoredPane = { id, letter, model: this.model.name, origin, tokens, steps, kept };
    await savePane(stored).catch(() => undefined); // no room, or a browser that keeps nothing: the page works on
  }

  /** A pane that was kept; its stream is found by `reconnect`. */
  static stored(engine: Engine, stored: StoredPane, model: Model): Pane {
    const pane = new Pane(engine, stored.id, stored.letter, model, stored.origin);
    pane.tokens = stored.tokens;
    pane.steps = stored.steps;
    pane.kept = stored.kept;
    pane.status = "waiting";
    return pane;
  }
}
