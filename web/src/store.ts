/** What the page keeps for the next visit: its streams, in IndexedDB; settings, in localStorage; a key, in sessionStorage. */

import type { Kept, Sampling, Step } from "./engine";

export interface StoredPane {
  id: string;
  letter: string;
  model: string;
  origin: { letter: string; position: number } | null;
  /** All that the stream has read. */
  tokens: number[];
  /** The last steps, which are shown. */
  steps: Step[];
  kept: Kept;
}

const LEFT_MS = 1000; // until a page that is reloaded has let its panes go

let opened: Promise<IDBDatabase> | null = null;

function database(): Promise<IDBDatabase> {
  opened ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open(`recurra-explorer ${location.pathname}`, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore("panes", { keyPath: "id" });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
  return opened;
}

async function inStore<Result>(mode: IDBTransactionMode, act: (store: IDBObjectStore) => IDBRequest<Result>): Promise<Result> {
  const transaction = (await database()).transaction("panes", mode);
  const asked = act(transaction.objectStore("panes"));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(asked.result);
    transaction.onerror = () => reject(transaction.error);
    transaction.onabort = () => reject(transaction.error);
  });
}

export function savePane(pane: StoredPane): Promise<unknown> {
  return inStore("readwrite", (store) => store.put(pane));
}

export function removePane(id: string): Promise<unknown> {
  return inStore("readwrite", (store) => store.delete(id));
}

export async function savedPanes(): Promise<StoredPane[]> {
  const panes: StoredPane[] = await inStore("readonly", (store) => store.getAll());
  return panes.sort((one, other) => (one.letter < other.letter ? -1 : 1));
}

const here = new Map<string, string>();

/** What was remembered until the tab is closed, or until the next visit where the browser stores nothing. */
export function remembered(name: string): string | null {
  try {
    return sessionStorage.getItem(name) ?? here.get(name) ?? null;
  } catch {
    return here.get(name) ?? null;
  }
}

export function remember(name: string, value: string): void {
  here.set(name, value);
  try {
    sessionStorage.setItem(name, value);
  } catch {
    // blocked or full: the page itself remembers it
  }
}

/** Let this tab alone have a pane, as long as the page lives; false if another tab has it. */
export function claim(id: string): Promise<boolean> {
  if (!navigator.locks) return Promise.resolve(true); // over http, except from this machine
  return new Promise((resolve) => {
    const hold = () => new Promise<void>(() => resolve(true));
    const signal = AbortSignal.timeout(LEFT_MS);
    const refused = (error: DOMException) => resolve(error.name !== "TimeoutError"); // else the browser allows no locks
    navigator.locks.request(`recurra pane ${id}`, { signal }, hold).catch(refused);
  });
}

export interface Settings {
  theme: "auto" | "light" | "dark";
  shows: "magnitudes" | "phases";
  sampling: Sampling;
}

const DEFAULTS: Settings = {
  theme: "auto",
  shows: "magnitudes",
  sampling: { maxTokens: 60, temperature: 0.8, topP: 0.95 },
};

export function readSettings(): Settings {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem("recurra-settings") ?? "{}") };
  } catch {
    return DEFAULTS;
  }
}

export function saveSettings(settings: Settings): void {
  try {
    localStorage.setItem("recurra-settings", JSON.stringify(settings));
  } catch {
    // blocked or full: they hold until the page is closed
  }
}
