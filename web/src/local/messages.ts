/** What the page and its worker say to each other. Calls are numbered, and so are streams. */

import type { Input, Kept, Model, Sampling, Step } from "../engine";

export type Call =
  | { what: "load"; base: string }
  | { what: "open"; stream: number; model: number }
  | { what: "resume"; stream: number; model: number; kept: Kept; tokens: number[] }
  | { what: "feed"; stream: number; input: Input }
  | { what: "generate"; stream: number; sampling: Sampling }
  | { what: "fork"; stream: number; position: number; twin: number }
  | { what: "settle"; stream: number; tokens: number[] }
  | { what: "keep"; stream: number }
  | { what: "close"; stream: number };

export type Request = { call: number; order: Call } | { cancel: number };

export interface Loaded {
  models: Model[];
  threads: number;
}

export type Reply =
  | { call: number; steps: Step[] }
  | { call: number; done: Loaded | Kept | null }
  | { call: number; error: string };
