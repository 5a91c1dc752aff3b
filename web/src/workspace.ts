/** All streams of the page, and what can be done with them. */

import type { Engine, Input, Model, Stream } from "./engine";
import { Unreachable } from "./engine";
import type { Origin } from "./pane";
import { Pane } from "./pane";
import type { Settings, StoredPane } from "./store";
import { claim, readSettings, saveSettings, savedPanes } from "./store";

const RETRY_MS = 1000;

/** A name for a pane, which this tab has from now on. */
function newId(): string {
  const id = crypto.randomUUID?.() ?? String(Math.random());
  void claim(id);
  return id;
}

export class Workspace {
  panes: Pane[] = [];
  /** Why no stream could be opened, forked or compared last time; empty if it could. */
  notice = "";
  active: Pane | null = null;
  /** Whether what is typed goes to all streams of text, rather than to the active one. */
  toAll = true;
  settings: Settings = readSettings();
  private isAsking = false;
  private readonly listeners = new Set<() => void>();

  constructor(
    readonly engine: Engine,
    private readonly isReachable: () => Promise<boolean>,
  ) {}

  onChange(listener: () => void): void {
    this.listeners.add(listener);
  }

  changed(): void {
    for (const listener of this.listeners) listener();
  }

  /** Find the streams of the last visit; open one if there are none. */
  async restore(): Promise<void> {
    for (const [stored, model] of await this.found()) {
      const isTaken = this.panes.some(({ letter }) => letter === stored.letter); // two tabs may have had one each
      this.show(Pane.stored(this.engine, isTaken ? { ...stored, letter: this.nextLetter() } : stored, model));
    }
    await Promise.all(this.panes.map((pane) => pane.reconnect()));
    if (!this.panes.length) await this.added(this.engine.models[0]);
    this.activate(this.panes[0]);
    setInterval(() => void this.retry(), RETRY_MS);
  }

  /** The panes of the last visit. Where other tabs have them all, copies of theirs, which continue independently. */
  private async found(): Promise<[StoredPane, Model][]> {
    const known = (await savedPanes().catch(() => [])).flatMap((stored): [StoredPane, Model][] => {
      const model = this.engine.models.find(({ name }) => name === stored.model);
      return model ? [[stored, model]] : [];
    });
    const isOwn = await Promise.all(known.map(([{ id }]) => claim(id)));
    if (isOwn.some(Boolean)) return known.filter((_, number) => isOwn[number]);
    return known.map(([stored, model]) => [{ ...stored, id: newId(), kept: { ...stored.kept, session: undefined } }, model]);
  }

  /** Open a stream at its start. */
  open(model: Model): Promise<void> {
    return this.noticing(() => this.added(model));
  }

  /** A twin that continues after the first `position` tokens, beside the stream. */
  fork(pane: Pane, position: number): Promise<void> {
    return this.noticing(async () => {
      const stream = await this.forked(pane, position);
      const steps = pane.steps.slice(0, Math.max(0, position - pane.first));
      const twin = this.paneOf(pane.model, this.nextLetter(), { letter: pane.letter, position });
      twin.begin(stream, await stream.keep(), pane.tokens.slice(0, position), steps);
      this.show(twin, pane);
      pane.select(null);
      this.activate(twin);
      await twin.save();
    });
  }

  /** A second model beside a stream, which reads the same text. */
  compare(pane: Pane, model: Model): Promise<void> {
    return this.noticing(async () => {
      const other = await this.added(model);
      const text = pane.steps.map((step) => step.text).join("");
      const input = model.task.kind === "text" && text ? { text } : { tokens: pane.tokens };
      if (pane.tokens.length) await other.feed(input);
    });
  }

  /** Close a stream. The last one is replaced by a new one; if none can be opened, it stays. */
  close(pane: Pane): Promise<void> {
    return this.noticing(async () => {
      const isLast = this.panes.length === 1;
      const next = isLast ? await this.opened(pane.model, pane.letter) : null;
      if (!this.panes.includes(pane)) return next?.close(); // asked twice
      const closing = pane.close();
      this.panes = this.panes.filter((other) => other !== pane);
      if (next) this.show(next);
      if (this.active === pane) this.activate(this.panes[0]);
      this.changed();
      await next?.save();
      await closing;
    });
  }

  activate(pane: Pane): void {
    this.active = pane;
    this.changed();
  }

  get texts(): Pane[] {
    return this.panes.filter((pane) => pane.model.task.kind === "text");
  }

  /** Where what is typed goes: to all streams of text, too, while the active one is a game. */
  get targets(): Pane[] {
    const active = this.texts.filter((pane) => pane === this.active);
    return this.toAll || !active.length ? this.texts : active;
  }

  /** Let streams read; those that read all of it are returned. */
  async feed(panes: Pane[], input: Input): Promise<Pane[]> {
    const read = await Promise.all(panes.map((pane) => pane.feed(input)));
    return panes.filter((_, number) => read[number]);
  }

  /** Let a stream read a text and continue it. */
  async begin(pane: Pane, text: string): Promise<void> {
    if (await pane.feed({ text })) await this.go([pane]);
  }

  /** Continue streams, each for as many tokens as the settings say. */
  async go(panes: Pane[]): Promise<void> {
    await Promise.all(panes.map((pane) => this.continued(pane)));
  }

  private async continued(pane: Pane): Promise<void> {
    if (pane.model.task.kind !== "text") return;
    if (!pane.tokens.length && !(await pane.feed({ tokens: pane.model.task.start }))) return;
    await pane.generate(this.settings.sampling);
  }

  set(settings: Partial<Settings>): void {
    this.settings = { ...this.settings, ...settings };
    saveSettings(this.settings);
    this.changed();
    for (const pane of this.panes) pane.changed();
  }

  /** Do what was asked for, and say why if it cannot be done. */
  private async noticing(act: () => Promise<unknown>): Promise<void> {
    this.notice = "";
    try {
      await act();
    } catch (error) {
      this.notice = error instanceof Error ? error.message : String(error);
    }
    this.changed();
  }

  /** Open a stream, show it and make it the active one. */
  private async added(model: Model): Promise<Pane> {
    const pane = await this.opened(model);
    this.show(pane);
    this.activate(pane);
    await pane.save();
    return pane;
  }

  private async opened(model: Model, letter?: string): Promise<Pane> {
    const stream = await this.engine.open(model);
    const kept = await stream.keep();
    const pane = this.paneOf(model, letter ?? this.nextLetter());
    pane.begin(stream, kept);
    return pane;
  }

  private async forked(pane: Pane, position: number): Promise<Stream> {
    try {
      if (pane.stream) return await pane.stream.fork(position);
    } catch (error) {
      if (error instanceof Unreachable) throw error;
    }
    // the engine kept no state near there, or has lost the stream: read the tokens again
    return this.engine.resume(pane.model, {}, pane.tokens.slice(0, position));
  }

  private paneOf(model: Model, letter: string, origin: Origin | null = null): Pane {
    return new Pane(this.engine, newId(), letter, model, origin);
  }

  private show(pane: Pane, after?: Pane): void {
    const place = after ? this.panes.indexOf(after) + 1 : this.panes.length;
    this.panes.splice(place, 0, pane);
    this.changed();
  }

  private nextLetter(): string {
    const taken = new Set(this.panes.map((pane) => pane.letter));
    const letters = Array.from({ length: 26 }, (_, number) => String.fromCharCode(65 + number));
    return letters.find((letter) => !taken.has(letter)) ?? "Z";
  }

  private async retry(): Promise<void> {
    const areWaiting = () => this.panes.filter((pane) => pane.status === "waiting");
    if (this.isAsking || !areWaiting().length) return;
    this.isAsking = true;
    const isBack = await this.isReachable().finally(() => (this.isAsking = false));
    if (!isBack) return;
    await Promise.all(areWaiting().map((pane) => pane.reconnect())); // those of now: the answer may take long
    this.changed();
  }
}
