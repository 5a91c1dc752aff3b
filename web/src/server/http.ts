/** Requests to the server that sent this page. */

import { Unreachable } from "../engine";
import { remember, remembered } from "../store";

const KEY = "recurra-api-key";
let asking: Promise<void> | null = null;

/** An answer that is an error, in the server's words. */
export class Refused extends Error {
  constructor(
    readonly status: number,
    message: string,
    /** What a program can tell errors of one status by. */
    readonly code: string | null = null,
  ) {
    super(message);
  }
}

/** Asks for the key of a server that wants one; kept until the tab is closed. */
export let askForKey: () => Promise<string> = () => Promise.reject(new Error("the server requires an API key"));

export function setKeyDialog(dialog: () => Promise<string>): void {
  askForKey = dialog;
}

/** Ask once, however many requests want the key. */
function askOnce(): Promise<void> {
  asking ??= askForKey()
    .then((key) => remember(KEY, key))
    .finally(() => (asking = null));
  return asking;
}

export async function request(method: string, path: string, body?: object, signal?: AbortSignal): Promise<Response> {
  for (;;) {
    const key = remembered(KEY);
    const headers: Record<string, string> = { "Content-Type": "application/json" };
    if (key) headers.Authorization = `Bearer ${key}`;
    let response: Response;
    try {
      response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Unreachable("the server does not answer");
    }
    if (response.ok) return response;
    if (response.status === 401) {
      if (key === remembered(KEY)) await askOnce(); // else another request has asked meanwhile
      continue;
    }
    if (response.status === 502 || response.status === 503 || response.status === 504) {
      throw new Unreachable("the server is not ready");
    }
    throw await refused(response);
  }
}

async function refused(response: Response): Promise<Refused> {
  try {
    const { message, code } = (await response.json()).error;
    return new Refused(response.status, message, code);
  } catch {
    return new Refused(response.status, `the server answered ${response.status}`);
  }
}

export interface ServerEvent {
  event: string;
  data: string;
}

/** The events of an answer, as they come. Raises Unreachable if the line breaks. */
export async function* events(response: Response, signal: AbortSignal): AsyncGenerator<ServerEvent[]> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (held + value.replaceAll("\r", "")).split("\n\n");
      held = blocks.pop()!;
      const found = blocks.map(parsed).filter((block) => block.data);
      if (found.length) yield found;
    }
  } catch (error) {
    if (signal.aborted) return;
    throw new Unreachable("the connection to the server broke");
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

function parsed(block: string): ServerEvent {
  const found: ServerEvent = { event: "message", data: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) found.event = line.slice(6).trim();
    if (line.startsWith("data:")) found.data += line.slice(5).trim();
  }
  return found;
}
