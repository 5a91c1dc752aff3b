/** Where the page begins: which engine it has, and the streams of the last visit. */

import { h } from "./dom";
import type { Engine } from "./engine";
import { damaged, parsed } from "./files";
import { localEngine } from "./local/engine";
import { isReachable, serverEngine } from "./server/engine";
import { setKeyDialog } from "./server/http";
import { App, keyDialog } from "./view/app";
import { Workspace } from "./workspace";
import { readSettings } from "./store";

async function engineOf(): Promise<Engine> {
  const response = await fetch("engine.json", { cache: "no-store" });
  if (!response.ok) throw new Error("engine.json is missing; expected the whole exported folder, or Recurra's server");
  const { engine, webgpu } = parsed(await response.text(), "engine.json");
  if (engine === "server") return serverEngine();
  if (engine === "local") return localEngine(webgpu === true);
  throw damaged("engine.json");
}

async function start(): Promise<void> {
  document.documentElement.dataset.theme = readSettings().theme;
  setKeyDialog(keyDialog);
  const engine = await engineOf();
  const workspace = new Workspace(engine, engine.kind === "server" ? isReachable : async () => true);
  await workspace.restore();
  new App(workspace);
  document.documentElement.dataset.ready = "true";
}

start().catch((error: unknown) => {
  const message = error instanceof Error ? error.message : String(error);
  document.body.replaceChildren(h("main", { class: "broken", role: "alert" }, h("h1", {}, "The explorer cannot start"), h("p", {}, message)));
});
