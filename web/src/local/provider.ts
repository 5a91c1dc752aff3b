/** What computes a model's steps in this page: WebAssembly on the processor, or WebGPU. */

export type Provider = "wasm" | "webgpu";

/** What `?provider=` in the address asks for; null leaves the choice to the page. */
export function asked(): Provider | null {
  const value = new URLSearchParams(location.search).get("provider");
  if (value === null || value === "wasm" || value === "webgpu") return value;
  throw new Error(`provider is ${value}; expected wasm or webgpu`);
}

interface Gpu {
  requestAdapter(): Promise<{ info?: { isFallbackAdapter?: boolean } } | null>;
}

/** Why WebGPU cannot be tried here; null if it can. One that computes on the processor has to be asked for. */
export async function obstacle(folderHasIt: boolean, isAsked: boolean): Promise<string | null> {
  if (!folderHasIt) return "this folder was exported without --webgpu";
  const { gpu } = navigator as { gpu?: Gpu };
  if (!gpu) return "this browser has no WebGPU";
  const adapter = await gpu.requestAdapter().catch(() => null);
  if (!adapter) return "this browser offers no GPU";
  return adapter.info?.isFallbackAdapter && !isAsked ? "this browser has only a software adapter, slower than WebAssembly" : null;
}
