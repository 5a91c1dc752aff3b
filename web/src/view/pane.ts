/** One stream: its text or game on one side, its gates and its memory on the other. */

import { h, onFrame } from "../dom";
import type { Pane } from "../pane";
import type { Workspace } from "../workspace";
import { GateMap } from "./gates";
import { Board } from "./horizon";
import { Inspector } from "./inspector";
import { Memory } from "./memory";
import { Transcript } from "./transcript";

interface Part {
  element: HTMLElement;
  draw(): void;
}

export class PaneView {
  readonly element: HTMLElement;
  private readonly go = h("button", { type: "button", class: "go" });
  private readonly state = h("p", { class: "status", role: "status" });
  private readonly models: HTMLSelectElement;
  private readonly parts: Part[];
  readonly draw: () => void;

  constructor(
    readonly pane: Pane,
    private readonly workspace: Workspace,
  ) {
    const isText = pane.model.task.kind === "text";
    const main: Part = isText ? new Transcript(pane, (text) => void workspace.begin(pane, text)) : new Board(pane);
    const toggle = () => workspace.set({ shows: workspace.settings.shows === "magnitudes" ? "phases" : "magnitudes" });
    const inspector = new Inspector(pane, () => void this.fork());
    const gates = new GateMap(pane, () => workspace.settings.shows, toggle);
    const memory = new Memory(pane);
    this.parts = [main, inspector, gates, memory];
    this.models = this.comparison();
    this.go.addEventListener("click", () => (pane.isBusy ? pane.stop() : void workspace.go([pane])));
    this.element = h(
      "article",
      { class: "pane", "aria-label": `Stream ${pane.letter}`, "data-letter": pane.letter },
      this.header(),
      this.state,
      h("div", { class: "words" }, main.element, inspector.element),
      h("div", { class: "instruments" }, gates.element, memory.element),
    );
    this.element.addEventListener("focusin", () => workspace.active !== pane && workspace.activate(pane));
    this.element.addEventListener("pointerdown", () => workspace.active !== pane && workspace.activate(pane));
    this.draw = onFrame(() => this.paint());
    pane.onChange(this.draw);
    new ResizeObserver(this.draw).observe(this.element);
  }

  /** A twin after the chosen token, or after the last one. */
  async fork(): Promise<void> {
    const { pane } = this;
    if (pane.isBusy || pane.status === "waiting") return;
    await this.workspace.fork(pane, pane.selected === null ? pane.tokens.length : pane.selected + 1);
  }

  private header(): HTMLElement {
    const { pane, workspace } = this;
    const origin = pane.origin ? `from ${pane.origin.letter} at token ${pane.origin.position}` : `${pane.model.weights}`;
    return h(
      "header",
      { class: "pane-header" },
      h("span", { class: "letter", "aria-hidden": "true" }, pane.letter),
      h("h2", {}, h("bdi", {}, pane.model.name), h("small", {}, origin)),
      h(
        "div",
        { class: "tools" },
        pane.model.task.kind === "text" && this.go,
        h("button", { type: "button", class: "quiet", title: "A copy that continues from here (F)", click: () => void this.fork() }, "Fork"),
        this.models.options.length > 2 && this.models,
      ),
      h(
        "button",
        { type: "button", class: "quiet close", "aria-label": `Close stream ${pane.letter}`, title: "Close", click: () => void workspace.close(pane) },
        "×",
      ),
    );
  }

  private comparison(): HTMLSelectElement {
    const { pane, workspace } = this;
    const others = workspace.engine.models.filter(({ task }) => task.kind === pane.model.task.kind);
    const select = h(
      "select",
      { class: "compare", "aria-label": "Compare with another model" },
      h("option", { value: "" }, "Compare…"),
      ...others.map(({ name }) => h("option", { value: name }, name)),
    );
    select.addEventListener("change", () => {
      const model = others.find(({ name }) => name === select.value);
      select.value = "";
      if (model) void workspace.compare(pane, model);
    });
    return select;
  }

  private paint(): void {
    const { pane } = this;
    this.go.textContent = pane.isBusy ? "Stop" : "Continue";
    this.go.classList.toggle("stop", pane.isBusy);
    this.go.disabled = pane.status === "waiting";
    const count = `${pane.tokens.length.toLocaleString("en")} token${pane.tokens.length === 1 ? "" : "s"}`;
    const rate = `${Math.round(pane.rate).toLocaleString("en")} tokens/s`;
    const said = {
      ready: pane.tokens.length ? `${count}${pane.rate ? `, ${rate}` : ""}` : "no tokens yet",
      reading: `reading: ${count}`,
      writing: `writing: ${count}, ${rate}`,
      waiting: `waiting for the server: ${pane.message || "connecting"}. The stream continues when the server is back.`,
      failed: pane.message,
    }[pane.status];
    if (this.state.textContent !== said) this.state.textContent = said;
    this.element.dataset.status = pane.status;
    this.element.dataset.position = String(pane.tokens.length);
    this.element.classList.toggle("active", this.workspace.active === pane && this.workspace.panes.length > 1);
    for (const part of this.parts) part.draw();
  }
}
