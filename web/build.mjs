// Builds the page into the Python package: `make web`. The package keeps a digest of the sources and of every built
// file, which a test compares.
import { createHash } from "node:crypto";
import { copyFile, mkdir, readFile, readdir, writeFile } from "node:fs/promises";
import { join, relative } from "node:path";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const here = import.meta.dirname;
const target = join(here, "../src/recurra/convert/export/page");
const ort = join(here, "node_modules/onnxruntime-web/dist");
const digest = (content) => createHash("sha256").update(content).digest("hex");

await mkdir(target, { recursive: true });
const listed = (await sources(here)).sort();
const lines = await Promise.all(listed.map(async (name) => `${name} ${digest(await readFile(join(here, name)))}\n`));
const sourcesDigest = digest(lines.join(""));
// Browsers keep files for days if a host says nothing of caching: with a version in the address, files of two builds
// never meet in one page.
const version = sourcesDigest.slice(0, 12);
const define = { VERSION: JSON.stringify(version) };
const common = { bundle: true, format: "esm", target: "es2022", minify: true, legalComments: "none", charset: "utf8", define };
const runtimes = { wasm: "ort-wasm-simd-threaded", webgpu: "ort-wasm-simd-threaded.asyncify" };
const workerDigests = {};
for (const [provider, name] of Object.entries({ wasm: "worker.js", webgpu: "worker-webgpu.js" })) {
  const [mjs, wasm] = await Promise.all(["mjs", "wasm"].map((kind) => readFile(join(ort, `${runtimes[provider]}.${kind}`))));
  const runtimeDigests = { mjs: digest(mjs), wasm: digest(wasm) };
  await build({
    ...common,
    entryPoints: [join(here, "src/local/worker.ts")],
    outfile: join(target, name),
    conditions: ["onnxruntime-web-use-extern-wasm"], // its code comes from a file beside the page, not from a blob
    define: { ...define, PROVIDER: JSON.stringify(provider), RUNTIME_DIGESTS: JSON.stringify(runtimeDigests) },
    alias: { "onnxruntime-web/wasm": `onnxruntime-web/${provider}` },
  });
  workerDigests[provider] = digest(await readFile(join(target, name)));
}
const inApp = { ...define, WORKER_DIGESTS: JSON.stringify(workerDigests) };
await build({ ...common, entryPoints: [join(here, "src/main.ts")], outfile: join(target, "app.js"), define: inApp });
await build({ ...common, entryPoints: [join(here, "src/recurra.ts")], outfile: join(target, "recurra.js"), define: inApp });
await copyFile(join(here, "recurra.d.ts"), join(target, "recurra.d.ts"));
await build({ ...common, format: undefined, entryPoints: [join(here, "src/style.css")], outfile: join(target, "style.css") });
await copyFile(join(here, "icon.svg"), join(target, "icon.svg"));
const index = await readFile(join(here, "index.html"), "utf8");
const integrity = createHash("sha256").update(await readFile(join(target, "app.js"))).digest("base64");
const withVersions = index.replace(/"(app\.js|style\.css)"/g, `"$1?v=${version}"`);
await writeFile(join(target, "index.html"), withVersions.replace(/(src="app\.js[^"]*")/, `$1 integrity="sha256-${integrity}"`));
const wasm = {};
for (const name of Object.values(runtimes)) {
  await copyFile(join(ort, `${name}.mjs`), join(target, `${name}.mjs`));
  wasm[`${name}.wasm.gz`] = await readFile(join(ort, `${name}.wasm`));
  await writeFile(join(target, `${name}.wasm.gz`), gzipSync(wasm[`${name}.wasm.gz`], { level: 9 }));
}

const licenses = [
  ["onnxruntime-web", join(here, "LICENSE-onnxruntime.txt")],
  ["@huggingface/tokenizers", join(here, "node_modules/@huggingface/tokenizers/LICENSE")],
];
const texts = licenses.map(async ([name, file]) => `${name}\n\n${(await readFile(file, "utf8")).trim()}\n`);
await writeFile(join(target, "licenses.txt"), (await Promise.all(texts)).join(`\n${"-".repeat(80)}\n\n`));

async function sources(folder) {
  const found = [];
  for (const entry of await readdir(folder, { withFileTypes: true })) {
    if (entry.name === "node_modules") continue;
    const path = join(folder, entry.name);
    found.push(...(entry.isDirectory() ? await sources(path) : [relative(here, path).replaceAll("\\", "/")]));
  }
  return found;
}

const built = {};
for (const name of (await readdir(target)).sort()) {
  if (name === "build.json") continue;
  built[name] = digest(wasm[name] ?? (await readFile(join(target, name))));
}
const onnxruntime = JSON.parse(await readFile(join(ort, "../package.json"), "utf8")).version;
const record = { sources: sourcesDigest, onnxruntime, files: built };
await writeFile(join(target, "build.json"), `${JSON.stringify(record, null, 2)}\n`);
console.log(`built ${Object.keys(built).length} files into src/recurra/convert/export/page`);
