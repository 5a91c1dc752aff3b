/** Models that a server runs: each stream is one of its sessions, which outlive page and server. */

import type { Engine, Gates, Input, Kept, Model, Sampling, Share, Step, Stream, Task } from "../engine";
import { MOST_CHANNELS, N_ALTERNATIVES, N_ANSWERS, Moved, Unreachable } from "../engine";
import { Refused, events, request } from "./http";

interface TokenJson {
  position: number;
  id: number;
  text: string;
  from: "read" | "written";
  logprob: number | null;
  alternatives?: Share[];
  answers?: Share[];
  gates?: { layers: number[]; magnitudes: string[]; phases: string[] };
}

interface ModelJson {
  id: string;
  recurra: {
    weights: string;
    task: Task | null;
    state_bytes: number;
    state_growth: { bytes: number; tokens: number | null }[];
    cache_bytes_per_token: number;
    gates: { layer: number; channels: number }[];
  };
}

const FEED_AT_ONCE = 8192; // tokens of a long transcript that is read again
const BUSY_MS = 50; // between two tries at a session whose turn ends
const MOST_BUSY_MS = 30_000;
const MOST_HEALTH_MS = 10_000;

class ServerStream implements Stream {
  constructor(
    private readonly model: Model,
    private readonly session: string,
    /** How many tokens the session has read, as far as this page knows. */
    private position = 0,
  ) {}

  async *feed(input: Input, signal: AbortSignal): AsyncGenerator<Step[]> {
    const answers = this.model.task.kind === "text" ? 0 : N_ANSWERS;
    yield* this.turn("feed", { ...input, answers }, signal);
  }

  async *generate(sampling: Sampling, signal: AbortSignal): AsyncGenerator<Step[]> {
    const { maxTokens: max_tokens, temperature, topP } = sampling;
    const top_p = temperature > 0 && topP < 1 ? topP : undefined;
    yield* this.turn("generate", { max_tokens, temperature, top_p }, signal);
  }

  async fork(position: number): Promise<Stream> {
    const { id } = await (await request("POST", `${this.path}/fork`, { position })).json();
    return new ServerStream(this.model, id, position);
  }

  async settle(tokens: number[]): Promise<void> {
    // Where it stands counts once nothing runs any more, and only the answer to a change says so: a stopped turn goes on
    // until the server has noticed, and may then stand further than what is shown.
    await orLater(async () => {
      this.position = await whenIdle(async () => {
        const { position: now } = await (await request("GET", this.path)).json();
        const to = Math.min(now, tokens.length);
        return (await (await request("POST", `${this.path}/rewind`, { position: to })).json()).position;
      });
      await this.read(tokens.slice(this.position));
    });
  }

  async read(tokens: number[]): Promise<void> {
    for (let first = 0; first < tokens.length; first += FEED_AT_ONCE) {
      const body = { tokens: tokens.slice(first, first + FEED_AT_ONCE), surprise: false };
      await request("POST", `${this.path}/feed`, body);
      this.position += body.tokens.length;
    }
  }

  async keep(): Promise<Kept> {
    return { session: this.session };
  }

  async close(): Promise<void> {
    await whenIdle(() => request("DELETE", this.path));
  }

  private get path(): string {
    return `v1/sessions/${this.session}`;
  }

  private async *turn(what: string, body: object, signal: AbortSignal): AsyncGenerator<Step[]> {
    const details = this.model.gates.length > 0;
    const alternatives = this.model.task.kind === "text" ? N_ALTERNATIVES : 0;
    const asked = { stream: true, surprise: true, alternatives, details, channels: MOST_CHANNELS, ...body };
    const response = await request("POST", `${this.path}/${what}`, asked, signal);
    let ended = false;
    for await (const some of events(response, signal)) {
      const steps: Step[] = [];
      for (const { event, data } of some) {
        const item = JSON.parse(data);
        if (event === "token") steps.push(this.next(item));
        if (event !== "end") continue;
        ended = true;
        if (item.finish_reason === "error") throw new Error(item.message || "the model failed on this turn");
        const cutShort = item.finish_reason === "cancelled" || item.finish_reason === "timeout";
        if (cutShort && !signal.aborted) throw new Error(`the server ended this turn early (${item.finish_reason})`);
      }
      if (steps.length) yield steps;
    }
    if (!ended && !signal.aborted) throw new Unreachable("the connection to the server broke");
  }

  private next(item: TokenJson): Step {
    if (item.position !== this.position + 1) throw new Moved("another page is using this stream");
    this.position = item.position;
    return stepOf(item);
  }
}

/** Try until no turn of the session runs any more. */
async function whenIdle<Result>(act: () => Promise<Result>): Promise<Result> {
  for (let waited = 0; ; waited += BUSY_MS) {
    try {
      return await act();
    } catch (error) {
      if (!(error instanceof Refused) || error.code !== "session_busy" || waited >= MOST_BUSY_MS) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, BUSY_MS));
  }
}

/** What stands in the way only for a time is no refusal: the page waits, and asks again. */
async function orLater<Result>(act: () => Promise<Result>): Promise<Result> {
  try {
    return await act();
  } catch (error) {
    const passes = error instanceof Refused && (error.status === 429 || error.code === "session_busy");
    throw passes ? new Unreachable(error.message) : error;
  }
}

function stepOf(item: TokenJson): Step {
  return {
    id: item.id,
    text: item.text,
    wasRead: item.from === "read",
    logprob: item.logprob,
    alternatives: item.alternatives ?? [],
    answers: item.answers ?? [],
    gates: item.gates ? gatesOf(item.gates) : null,
  };
}

function gatesOf(gates: { magnitudes: string[]; phases: string[] }): Gates {
  const bytes = (text: string) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return { magnitudes: gates.magnitudes.map(bytes), phases: gates.phases.map(bytes) };
}

/** Whether the server answers now. */
export async function isReachable(): Promise<boolean> {
  try {
    return (await fetch("health", { cache: "no-store", signal: AbortSignal.timeout(MOST_HEALTH_MS) })).ok;
  } catch {
    return false;
  }
}

export async function serverEngine(): Promise<Engine> {
  const { data } = (await (await request("GET", "v1/models")).json()) as { data: ModelJson[] };
  const shown = data.filter(({ recurra }) => recurra.task);
  if (!shown.length) throw new Error("the server has no model of text or of Memory Horizon, which this page could show");
  const models: Model[] = shown.map(({ id, recurra }) => ({
    name: id,
    task: recurra.task!,
    weights: recurra.weights,
    stateBytes: recurra.state_bytes,
    stateGrowth: recurra.state_growth,
    cacheBytesPerToken: recurra.cache_bytes_per_token,
    gates: recurra.gates,
  }));
  async function open(model: Model): Promise<ServerStream> {
    const { id } = await (await request("POST", "v1/sessions", { model: model.name })).json();
    return new ServerStream(model, id);
  }
  return {
    kind: "server",
    models,
    place: `running on ${location.host}`,
    open,
    async resume(model, kept, tokens) {
      try {
        if (kept.session) {
          const stream = new ServerStream(model, kept.session);
          await stream.settle(tokens);
          return stream;
        }
      } catch (error) {
        if (!(error instanceof Refused)) throw error; // a session that is gone, or cannot go back: read it all again
      }
      return orLater(async () => {
        const stream = await open(model);
        try {
          await stream.read(tokens);
        } catch (error) {
          void stream.close().catch(() => undefined); // the next try opens another one
          throw error;
        }
        return stream;
      });
    },
  };
}
