/** The module for other pages, built as recurra.js: the page's engine behind the interface of recurra.d.ts. */

import type * as Api from "../recurra";
import type { Engine, Input, Model, Step, Stream } from "./engine";
import { damaged, fetched, parsed } from "./files";
import { normaliser } from "./local/choosing";
import { localEngine } from "./local/engine";

type Start = (stream: Stream, signal: AbortSignal) => AsyncGenerator<Step[]>;

const engines = new Map<string, Promise<Engine>>();

export const load: typeof Api.load = async (folder = new URL("./", import.meta.url), { name } = {}) => {
  const url = new URL(folder, document.baseURI);
  [url.search, url.hash] = ["", ""];
  if (!url.pathname.endsWith("/")) url.pathname += "/";
  const base = url.href;
  if (!engines.has(base)) engines.set(base, engineOf(base));
  const engine = await engines.get(base)!.catch((error: unknown) => {
    engines.delete(base); // the next call tries again
    throw error;
  });
  const model = name === undefined ? engine.models[0] : engine.models.find((one) => one.name === name);
  if (!model) throw wrong("name", name, `one of ${engine.models.map((one) => one.name).join(", ")}`);
  const { weights, stateBytes } = model;
  return { name: model.name, weights, stateBytes, stream: () => new OpenStream(model, engine.open(model), []) };
};

async function engineOf(base: string): Promise<Engine> {
  const address = `${base}engine.json`;
  const { engine, webgpu } = parsed(await (await fetched(address)).text(), address);
  if (engine !== "local") throw damaged(address);
  return localEngine(webgpu === true, base, null);
}

class OpenStream implements Api.Stream {
  private isBusy = false;

  constructor(
    private readonly model: Model,
    private readonly opened: Promise<Stream>,
    readonly tokens: number[],
  ) {
    opened.catch(() => undefined); // whoever uses the stream hears of it
  }

  async feed(input: string | Iterable<number>): Promise<Api.Token[]> {
    const given: Input = typeof input === "string" ? { text: input } : { tokens: Array.from(input) };
    const unfit = "tokens" in given ? given.tokens.find((id) => !isWhole(id, 0)) : undefined;
    if (unfit !== undefined) throw wrong("a token", unfit, "a whole number from 0");
    const read: Step[] = [];
    for await (const step of this.turn((stream, signal) => stream.feed(given, signal))) read.push(step);
    return read;
  }

  async *generate(n: number, options: Api.Sampling = {}): AsyncGenerator<Api.Token, void, undefined> {
    const { temperature = 1, topK, topP = 1, seed } = options;
    const { name, task } = this.model;
    if (task.kind !== "text") throw wrong("the model", name, "one of text, which continues what it reads");
    if (!isWhole(n, 0)) throw wrong("n", n, "a whole number from 0");
    if (!(temperature >= 0 && temperature < Infinity)) throw wrong("temperature", temperature, "a number from 0");
    if (topK !== undefined && !isWhole(topK, 1)) throw wrong("topK", topK, "a whole number from 1");
    if (!(topP > 0 && topP <= 1)) throw wrong("topP", topP, "a number above 0 and at most 1");
    const fits = seed === undefined || (isWhole(seed, 0) && seed < 2 ** 32);
    if (!fits) throw wrong("seed", seed, "a whole number from 0 to 2^32 - 1");
    if (!this.tokens.length) await this.feed(task.start);
    yield* this.turn((stream, signal) => stream.generate({ maxTokens: n, temperature, topK, topP, seed }, signal));
  }

  fork(position = this.tokens.length): OpenStream {
    const fits = isWhole(position, 0) && position <= this.tokens.length;
    if (!fits) throw wrong("position", position, `a whole number from 0 to ${this.tokens.length}`);
    const twin = this.opened.then((stream) => stream.fork(position));
    return new OpenStream(this.model, twin, this.tokens.slice(0, position));
  }

  async logits(): Promise<Float32Array | null> {
    this.requireRest(); // in a turn, the worker is ahead of the page
    return (await (await this.opened).keep()).logits ?? null;
  }

  async probabilities(): Promise<Float32Array | null> {
    const logits = await this.logits();
    const total = logits && normaliser(logits);
    return logits && logits.map((logit) => Math.exp(logit - total!));
  }

  async close(): Promise<void> {
    this.requireRest();
    await (await this.opened).close();
  }

  /** Hand out steps one by one. Afterwards the stream stands after those that were handed out. */
  private async *turn(start: Start): AsyncGenerator<Step, void, undefined> {
    this.requireRest();
    this.isBusy = true;
    try {
      const stream = await this.opened;
      const cancel = new AbortController();
      const running = start(stream, cancel.signal);
      let isComplete = false;
      try {
        for (let next = await running.next(); !next.done; next = await running.next()) {
          for (const step of next.value) {
            this.tokens.push(step.id);
            yield step;
          }
        }
        isComplete = true;
      } finally {
        if (!isComplete) {
          cancel.abort();
          while (!(await running.next()).done); // steps that the worker was ahead
          await stream.settle(this.tokens);
        }
      }
    } finally {
      this.isBusy = false;
    }
  }

  private requireRest(): void {
    if (!this.isBusy) return;
    throw new Error("the stream is busy; expected one at rest: await feed(), end the loop over generate(), or fork()");
  }
}

function isWhole(value: number, least: number): boolean {
  return Number.isSafeInteger(value) && value >= least;
}

function wrong(name: string, got: unknown, expected: string): RangeError {
  return new RangeError(`${name} is ${got}; expected ${expected}`);
}
