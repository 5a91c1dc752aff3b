/** Models that run inside this page, in a worker. */

import type { Engine, Input, Kept, Model, Sampling, Step, Stream } from "../engine";
import { fetchedWith } from "../files";
import type { Call, Loaded, Reply } from "./messages";
import type { Provider } from "./provider";
import { asked, obstacle } from "./provider";

type Listener = (reply: Reply) => void;

/** The page's end of the line to the worker. */
class Line {
  private readonly listeners = new Map<number, Listener>();
  private nextCall = 0;
  nextStream = 0;

  constructor(private readonly worker: Worker) {
    worker.onmessage = ({ data }: MessageEvent<Reply>) => this.listeners.get(data.call)?.(data);
    worker.onerror = (event) => {
      const error = event.message || "the worker could not be started";
      for (const [call, listener] of this.listeners) listener({ call, error });
    };
  }

  ask<Result>(order: Call): Promise<Result> {
    const call = this.nextCall++;
    return new Promise((resolve, reject) => {
      this.listeners.set(call, (reply) => {
        this.listeners.delete(call);
        if ("error" in reply) reject(new Error(reply.error));
        else if ("done" in reply) resolve(reply.done as Result);
      });
      this.worker.postMessage({ call, order });
    });
  }

  async *steps(order: Call, signal: AbortSignal): AsyncGenerator<Step[]> {
    const call = this.nextCall++;
    const replies: Reply[] = [];
    let wake: () => void = () => undefined;
    this.listeners.set(call, (reply) => {
      replies.push(reply);
      wake();
    });
    signal.addEventListener("abort", () => this.worker.postMessage({ cancel: call }), { once: true });
    this.worker.postMessage({ call, order });
    try {
      for (;;) {
        if (!replies.length) await new Promise<void>((resolve) => (wake = resolve));
        const reply = replies.shift()!;
        if ("error" in reply) throw new Error(reply.error);
        if ("done" in reply) return;
        yield reply.steps;
      }
    } finally {
      this.listeners.delete(call);
    }
  }
}

class LocalStream implements Stream {
  constructor(
    private readonly line: Line,
    private readonly stream: number,
  ) {}

  feed(input: Input, signal: AbortSignal): AsyncGenerator<Step[]> {
    return this.line.steps({ what: "feed", stream: this.stream, input }, signal);
  }

  generate(sampling: Sampling, signal: AbortSignal): AsyncGenerator<Step[]> {
    return this.line.steps({ what: "generate", stream: this.stream, sampling }, signal);
  }

  async fork(position: number): Promise<Stream> {
    const twin = this.line.nextStream++;
    await this.line.ask({ what: "fork", stream: this.stream, position, twin });
    return new LocalStream(this.line, twin);
  }

  async settle(tokens: number[]): Promise<void> {
    await this.line.ask({ what: "settle", stream: this.stream, tokens });
  }

  keep(): Promise<Kept> {
    return this.line.ask({ what: "keep", stream: this.stream });
  }

  async close(): Promise<void> {
    await this.line.ask({ what: "close", stream: this.stream });
  }
}

/** Set by build.mjs: a browser may still have the worker of another build under its plain name. */
declare const VERSION: string;
/** The SHA-256 of each worker, likewise. */
declare const WORKER_DIGESTS: Record<Provider, string>;

const WORKERS = { wasm: "worker.js", webgpu: "worker-webgpu.js" };

async function loaded(base: string, provider: Provider): Promise<[Line, Loaded]> {
  const address = `${base}${WORKERS[provider]}?v=${VERSION}`;
  await fetchedWith(WORKER_DIGESTS[provider], address);
  const worker = new Worker(address, { type: "module" });
  const line = new Line(worker);
  try {
    return [line, await line.ask<Loaded>({ what: "load", base })];
  } catch (error) {
    worker.terminate();
    throw error;
  }
}

/** WebGPU where it can be had and agrees with WebAssembly; the last part says what there is, and why. */
async function chosen(base: string, webgpuIsThere: boolean, wanted: Provider | null): Promise<[Line, Loaded, string]> {
  let why = wanted === "wasm" ? "not requested" : await obstacle(webgpuIsThere, wanted === "webgpu");
  if (why === null) {
    try {
      const [line, found] = await loaded(base, "webgpu");
      return [line, found, "WebGPU"];
    } catch (error) {
      why = error instanceof Error ? error.message : String(error);
    }
  }
  if (wanted === "webgpu") throw new Error(`WebGPU cannot be used: ${why}`);
  const [line, found] = await loaded(base, "wasm");
  const { threads } = found;
  const said = `WebAssembly, ${threads} thread${threads > 1 ? "s" : ""}`;
  return [line, found, webgpuIsThere ? `${said} (no WebGPU: ${why})` : said];
}

/** The models of the folder at `base`, by default the page's own; `wanted` is null where either provider will do. */
export async function localEngine(
  webgpuIsThere: boolean,
  base = new URL("./", document.baseURI).href,
  wanted = asked(),
): Promise<Engine> {
  const [line, { models }, provider] = await chosen(base, webgpuIsThere, wanted);
  const number = (model: Model) => models.findIndex((other) => other.name === model.name);
  return {
    kind: "local",
    models,
    place: `running in this page: ${provider}`,
    async open(model) {
      const stream = line.nextStream++;
      await line.ask({ what: "open", stream, model: number(model) });
      return new LocalStream(line, stream);
    },
    async resume(model, kept, tokens) {
      const stream = line.nextStream++;
      await line.ask({ what: "resume", stream, model: number(model), kept, tokens });
      return new LocalStream(line, stream);
    },
  };
}
