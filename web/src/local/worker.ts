/** The worker that runs models: onnxruntime-web computes one token at a time, and the state stays here. */

import * as ort from "onnxruntime-web/wasm";
import type { Kept, Model, Step, Task } from "../engine";
import { fetched, fetchedWith, parsed, requireDigest } from "../files";
import { difference } from "./agreement";
import { seeded } from "./choosing";
import type { Call, Loaded, Reply, Request } from "./messages";
import type { Provider } from "./provider";
import type { Outputs, Runner } from "./stream";
import { LocalStream } from "./stream";
import type { TextEncoder as Encoder } from "./tokenizer";
import { readTokenizer } from "./tokenizer";

interface Described {
  name: string;
  task: Task;
  weights: string;
  state_bytes: number;
  cache_bytes_per_token: number;
  gates: { layer: number; channels: number }[];
  file: string;
  sha256: string;
  tokenizer: string | null;
  tokenizer_sha256: string | null;
  state: { name: string; shape: number[] }[];
  vocab_size: number;
  /** How far WebGPU's logits may lie from WebAssembly's, relative to the largest. */
  tolerance: number;
}

/** Set by build.mjs: this worker is built twice, with two builds of onnxruntime-web. */
declare const PROVIDER: Provider;
/** The SHA-256 of onnxruntime's files, likewise. */
declare const RUNTIME_DIGESTS: Record<"mjs" | "wasm", string>;

const RUNTIMES = { wasm: "ort-wasm-simd-threaded", webgpu: "ort-wasm-simd-threaded.asyncify" };
const SHOWN_MS = 30; // steps are handed to the page this often

let runners: Runner[] = [];
const streams = new Map<number, LocalStream>();
const cancelled = new Set<number>();
let running: Promise<unknown> = Promise.resolve(); // a session computes one step at a time

async function load(base: string): Promise<Loaded> {
  const runtime = (kind: string) => `${base}${RUNTIMES[PROVIDER]}.${kind}?v=${ort.env.versions.web}`;
  await fetchedWith(RUNTIME_DIGESTS.mjs, runtime("mjs"));
  ort.env.wasm.wasmPaths = { mjs: runtime("mjs"), wasm: runtime("wasm") };
  ort.env.wasm.wasmBinary = await fetchedWith(RUNTIME_DIGESTS.wasm, runtime("wasm"));
  ort.env.wasm.numThreads = self.crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency || 1) : 1;
  ort.env.logLevel = "error";
  runners = [];
  for (const described of await readModels(`${base}engine.json`)) runners.push(await loadModel(base, described));
  return { models: runners.map((runner) => runner.model), threads: ort.env.wasm.numThreads };
}

/** The file has the digest of its own text, in which that is empty. */
async function readModels(address: string): Promise<Described[]> {
  const text = await (await fetched(address)).text();
  const { models, sha256 } = parsed(text, address) as { models: Described[]; sha256: string };
  await requireDigest(new TextEncoder().encode(text.replace(`"${sha256}"`, '""')), address, sha256);
  return models;
}

async function loadModel(base: string, described: Described): Promise<Runner> {
  const content = await fetchedWith(described.sha256, base + described.file);
  const start = () => described.state.map(({ shape }) => new Float32Array(shape.reduce((one, other) => one * other, 1)));
  const session = await created(content, PROVIDER);
  if (PROVIDER === "webgpu") await requireAgreement(session, content, described, start);
  const tokenizer = described.tokenizer ? await loadTokenizer(base + described.tokenizer, described.tokenizer_sha256!) : null;
  const model: Model = {
    name: described.name,
    task: described.task,
    weights: described.weights,
    stateBytes: described.state_bytes,
    stateGrowth: [],
    cacheBytesPerToken: described.cache_bytes_per_token,
    gates: described.gates,
  };
  const run = (token: number, state: Float32Array[]) => alone(() => step(session, described, token, state));
  return { model, digest: described.sha256, tokenizer, start, run };
}

async function loadTokenizer(address: string, digest: string): Promise<Encoder> {
  return readTokenizer(JSON.parse(new TextDecoder().decode(await fetchedWith(digest, address))));
}

function created(content: ArrayBuffer, provider: Provider): Promise<ort.InferenceSession> {
  const options = { executionProviders: [provider], graphOptimizationLevel: "all" } as const;
  return ort.InferenceSession.create(new Uint8Array(content), options);
}

async function requireAgreement(
  session: ort.InferenceSession,
  content: ArrayBuffer,
  described: Described,
  start: () => Float32Array[],
): Promise<void> {
  const plain = await created(content, "wasm");
  const runs = (one: ort.InferenceSession) => (token: number, state: Float32Array[]) => step(one, described, token, state);
  const apart = await difference(runs(session), runs(plain), start, described.vocab_size);
  await plain.release();
  if (apart <= described.tolerance) return;
  throw new Error(`its logits of ${described.name} differ by ${apart.toExponential(1)}; expected at most ${described.tolerance}`);
}

async function step(
  session: ort.InferenceSession,
  described: Described,
  token: number,
  state: Float32Array[],
): Promise<Outputs> {
  const feeds: Record<string, ort.Tensor> = { token: new ort.Tensor("int64", BigInt64Array.of(BigInt(token)), [1, 1]) };
  described.state.forEach(({ name, shape }, number) => {
    feeds[`state.${name}`] = new ort.Tensor("float32", state[number], shape);
  });
  const found = await session.run(feeds);
  const values = (name: string) => found[name].data as Float32Array;
  return {
    logits: values("logits"),
    magnitudes: values("magnitudes"),
    phases: values("phases"),
    state: described.state.map(({ name }) => values(`next_state.${name}`)),
  };
}

function alone<Result>(task: () => Promise<Result>): Promise<Result> {
  const result = running.then(task);
  running = result.catch(() => undefined);
  return result;
}

/** Let messages in: a cancellation among them. Two streams may wait here at once. */
const { port1, port2 } = new MessageChannel();
const waiting: (() => void)[] = [];
port1.onmessage = () => waiting.shift()!();
function breathe(): Promise<void> {
  return new Promise((resolve) => {
    waiting.push(resolve);
    port2.postMessage(null);
  });
}

async function stepwise(call: number, count: number, next: (number: number) => Promise<Step>): Promise<void> {
  let steps: Step[] = [];
  let shown = performance.now();
  for (let number = 0; number < count && !cancelled.has(call); number++) {
    steps.push(await next(number));
    if (performance.now() - shown >= SHOWN_MS) {
      reply({ call, steps });
      steps = [];
      await breathe();
      shown = performance.now();
    }
  }
  if (steps.length) reply({ call, steps });
}

function streamOf(number: number): LocalStream {
  const stream = streams.get(number);
  if (!stream) throw new Error(`stream ${number} is closed`);
  return stream;
}

/** The stream at the state that was kept, or at its start if that does not fit this model. */
function resumed(runner: Runner, kept: Kept, tokens: number[]): LocalStream {
  const { tensors, logits, position = 0, digest } = kept;
  const start = runner.start();
  const isOfThisModel = digest === runner.digest && tensors?.length === start.length;
  const fits = isOfThisModel && start.every((x, number) => x.length === tensors[number].length);
  if (!fits || position > tokens.length) return new LocalStream(runner);
  return LocalStream.resumed(runner, tokens.slice(0, position), tensors, logits ?? null);
}

async function answer(call: number, order: Call): Promise<Loaded | Kept | null> {
  switch (order.what) {
    case "load":
      return load(order.base);
    case "open":
      streams.set(order.stream, new LocalStream(runners[order.model]));
      return null;
    case "resume": {
      const stream = resumed(runners[order.model], order.kept, order.tokens);
      for (const token of order.tokens.slice(stream.tokens.length)) await stream.read(token);
      streams.set(order.stream, stream);
      return null;
    }
    case "feed": {
      const stream = streamOf(order.stream);
      const tokens = "text" in order.input ? stream.encode(order.input.text) : order.input.tokens;
      await stepwise(call, tokens.length, (number) => stream.read(tokens[number]));
      return null;
    }
    case "generate": {
      const stream = streamOf(order.stream);
      const { maxTokens, seed } = order.sampling;
      const random = seed === undefined ? Math.random : seeded(seed);
      await stepwise(call, maxTokens, () => stream.write(order.sampling, random));
      return null;
    }
    case "fork":
      streams.set(order.twin, await streamOf(order.stream).fork(order.position));
      return null;
    case "settle": {
      const stream = streamOf(order.stream);
      if (stream.tokens.length !== order.tokens.length) streams.set(order.stream, await stream.fork(order.tokens.length));
      return null;
    }
    case "keep": {
      return streamOf(order.stream).kept();
    }
    case "close":
      streams.delete(order.stream);
      return null;
  }
}

function reply(message: Reply): void {
  self.postMessage(message);
}

self.onmessage = async ({ data }: MessageEvent<Request>) => {
  if ("cancel" in data) {
    cancelled.add(data.cancel);
    return;
  }
  try {
    reply({ call: data.call, done: await answer(data.call, data.order) });
  } catch (error) {
    reply({ call: data.call, error: error instanceof Error ? error.message : String(error) });
  }
};
