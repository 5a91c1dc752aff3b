/** Files of an exported folder, as the host has them now, compared with their digests. */

/** Fetch a file anew: it may be that of a new export since the last visit. */
export async function fetched(address: string): Promise<Response> {
  const response = await fetch(address, { cache: "no-cache" });
  if (!response.ok) throw new Error(`${address} is missing (${response.status}); expected the whole exported folder`);
  return response;
}

export async function fetchedWith(digest: string, address: string): Promise<ArrayBuffer> {
  const content = await (await fetched(address)).arrayBuffer();
  await requireDigest(content, address, digest);
  return content;
}

export async function requireDigest(content: BufferSource, address: string, expected: string): Promise<void> {
  if (!self.crypto?.subtle) return; // a page that is neither local nor https has none
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", content));
  const found = Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
  if (found !== expected) throw damaged(address);
}

export function parsed(text: string, address: string): Record<string, unknown> {
  try {
    const content: unknown = JSON.parse(text);
    if (typeof content === "object" && content !== null) return content as Record<string, unknown>;
  } catch {
    // said below
  }
  throw damaged(address);
}

export function damaged(address: string): Error {
  const name = new URL(address, location.href).pathname.split("/").pop();
  return new Error(`${name} is damaged; export the run again`);
}
