/** All streams of the page, and what can be done with them. */

import type { Engine, Input, Model } from "./engine";
import { Pane } from "./pane";
import type { Settings } from "./store";
import { readSettings, saveSettings, savedPanes } from "./store";

const RETRY_MS = 1000;

export class Workspace {
  panes: Pane[] = [];
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
    for (const stored of await savedPanes().catch(() => [])) {
      const model = this.engine.models.find(({ name }) => name === stored.model);
      if (model) this.show(Pane.stored(stored, model));
    }
    await Promise.all(this.panes.map((pane) => pane.reconnect(this.engine)));
    if (!this.panes.length) await this.open(this.engine.models[0]);
    this.activate(this.panes[0]);
    setInterval(() => void this.retry(), RETRY_MS);
  }

  /** Open a stream at its start. */
  async open(model: Model): Promise<Pane> {
    const stream = await this.engine.open(model);
    const pane = new Pane(crypto.randomUUID?.() ?? String(Math.random()), this.nextLetter(), model, null);
    pane.begin(stream, await stream.keep());
    this.show(pane);
    this.activate(pane);
    await pane.save();
    return pane;
  }

  /** A twin that continues after the first `position` tokens, beside the stream. */
  async fork(pane: Pane, position: number): Promise<Pane> {
    const stream = await pane.stream!.fork(position).catch(async () => {
      // the engine kept no state near there: read the tokens again
      return this.engine.resume(pane.model, {}, pane.tokens.slice(0, position));
    });
    const origin = { letter: pane.letter, position };
    const twin = new Pane(crypto.randomUUID?.() ?? String(Math.random()), this.nextLetter(), pane.model, origin);
    const steps = pane.steps.slice(0, Math.max(0, position - pane.first));
    twin.begin(stream, await stream.keep(), pane.tokens.slice(0, position), steps);
    this.show(twin, pane);
    pane.select(null);
    this.activate(twin);
    await twin.save();
    return twin;
  }

  /** A second model beside a stream, which reads the same text. */
  async compare(pane: Pane, model: Model): Promise<Pane> {
    const other = await this.open(model);
    const text = pane.steps.map((step) => step.text).join("");
    const input = model.task.kind === "text" && text ? { text } : { tokens: pane.tokens };
    if (pane.tokens.length) await other.feed(input);
    return other;
  }

  async close(pane: Pane): Promise<void> {
    const closing = pane.close();
    this.panes = this.panes.filter((other) => other !== pane);
    if (!this.panes.length) await this.open(pane.model);
    if (this.active === pane) this.activate(this.panes[0]);
    this.changed();
    await closing;
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

  /** Let streams go on, each for as many tokens as the settings say. */
  async go(panes: Pane[]): Promise<void> {
    await Promise.all(panes.map((pane) => this.goOn(pane)));
  }

  private async goOn(pane: Pane): Promise<void> {
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
    await Promise.all(areWaiting().map((pane) => pane.reconnect(this.engine))); // those of now: the answer may take long
    this.changed();
  }
}
