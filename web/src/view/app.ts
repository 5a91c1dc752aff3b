/** The page as a whole: its head, the streams side by side, and the line to type in. */

import { gradient, MAGNITUDES } from "../colours";
import { h } from "../dom";
import type { Pane } from "../pane";
import type { Settings } from "../store";
import type { Workspace } from "../workspace";
import { Composer } from "./composer";
import { PaneView } from "./pane";

const THEMES: Settings["theme"][] = ["auto", "light", "dark"];
const KEYS: [string, string][] = [
  ["Enter", "read the text and continue"],
  ["Ctrl + Enter", "read the text only"],
  ["/", "go to the text box"],
  ["G", "continue, or stop"],
  ["← → ↑ ↓", "select a token in the focused stream"],
  ["F", "fork after the selected token, or at the end"],
  ["Esc", "clear the selection"],
  ["[ ]", "previous or next stream"],
  ["V", "show gates or phases"],
  ["T", "theme: system, light or dark"],
  ["0 – 9", "Memory Horizon: play a number"],
  ["R", "Memory Horizon: reset"],
  ["P", "Memory Horizon: play at random"],
];

const ASCII = "Expected printable ASCII without spaces";

export class App {
  private readonly views = new Map<Pane, PaneView>();
  private readonly panes = h("main", { class: "panes" });
  private readonly composer: Composer;
  private readonly help = helpDialog();
  private readonly legend = h(
    "span",
    { class: "legend", title: "How surprising each token was, in bits" },
    "expected",
    h("span", { class: "ramp heat" }),
    "surprising",
  );
  private readonly notice = h("p", { class: "notice", role: "alert", hidden: true });
  private readonly theme = h("button", { type: "button", class: "quiet theme" });

  constructor(private readonly workspace: Workspace) {
    this.composer = new Composer(workspace);
    this.theme.addEventListener("click", () => this.turnTheme());
    document.body.replaceChildren(this.header(), this.notice, this.panes, this.composer.element, this.help);
    workspace.onChange(() => this.draw());
    document.addEventListener("keydown", (event) => this.key(event));
    this.draw();
  }

  private header(): HTMLElement {
    const { engine } = this.workspace;
    return h(
      "header",
      { class: "top" },
      h("h1", {}, mark(), "Recurra"),
      h("p", { class: "place" }, engine.place),
      this.legend,
      this.opener(),
      this.theme,
      h("button", { type: "button", class: "quiet", click: () => this.help.showModal(), title: "Keys (?)" }, "Keys"),
    );
  }

  /** Opens another stream, of any model. */
  private opener(): HTMLElement {
    const { workspace } = this;
    const { models } = workspace.engine;
    if (models.length === 1) {
      return h("button", { type: "button", class: "quiet", click: () => void workspace.open(models[0]) }, "New stream");
    }
    const select = h(
      "select",
      { class: "compare", "aria-label": "Open a new stream" },
      h("option", { value: "" }, "New stream…"),
      ...models.map(({ name }) => h("option", { value: name }, name)),
    );
    select.addEventListener("change", () => {
      const model = models.find(({ name }) => name === select.value);
      select.value = "";
      if (model) void workspace.open(model);
    });
    return select;
  }

  private draw(): void {
    const { workspace } = this;
    for (const [pane, view] of this.views) {
      if (workspace.panes.includes(pane)) continue;
      view.element.remove();
      this.views.delete(pane);
    }
    const shown = workspace.panes.map((pane) => this.viewOf(pane).element);
    if (shown.some((element, number) => this.panes.children[number] !== element)) this.panes.replaceChildren(...shown);
    this.panes.dataset.count = String(shown.length);
    this.notice.textContent = workspace.notice;
    this.notice.hidden = !workspace.notice;
    this.composer.draw();
    this.legend.hidden = this.composer.element.hidden;
    const { theme } = workspace.settings;
    this.theme.replaceChildren(h("span", { class: "of-theme" }, "Theme: "), theme);
    this.theme.title = "System, light or dark (T)";
    document.documentElement.dataset.theme = theme;
    for (const view of this.views.values()) view.draw();
  }

  private viewOf(pane: Pane): PaneView {
    let view = this.views.get(pane);
    if (!view) this.views.set(pane, (view = new PaneView(pane, this.workspace)));
    return view;
  }

  private turnTheme(): void {
    const { theme } = this.workspace.settings;
    this.workspace.set({ theme: THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length] });
  }

  private key(event: KeyboardEvent): void {
    const isTyping = (event.target as Element).closest("input, textarea, select, dialog");
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const { workspace } = this;
    const { active } = workspace;
    const actions: Record<string, () => void> = {
      "/": () => this.composer.text.focus(),
      "?": () => this.help.showModal(),
      g: () => active && (active.isBusy ? active.stop() : void workspace.go([active])),
      f: () => active && void this.viewOf(active).fork(),
      v: () => workspace.set({ shows: workspace.settings.shows === "magnitudes" ? "phases" : "magnitudes" }),
      t: () => this.turnTheme(),
      "[": () => this.neighbour(-1),
      "]": () => this.neighbour(1),
    };
    const act = actions[event.key.toLowerCase()];
    if (!act) return;
    event.preventDefault();
    act();
  }

  private neighbour(direction: number): void {
    const { panes, active } = this.workspace;
    const next = panes[(panes.indexOf(active!) + direction + panes.length) % panes.length];
    this.workspace.activate(next);
    this.viewOf(next).element.querySelector<HTMLElement>("[tabindex='0']")?.focus();
  }
}

/** The sign of the page: a gate that closes, as in the map. */
function mark(): HTMLElement {
  const sign = h("span", { class: "sign", "aria-hidden": "true" });
  sign.style.background = gradient(MAGNITUDES);
  return sign;
}

function helpDialog(): HTMLDialogElement {
  const rows = KEYS.map(([keys, what]) => h("div", {}, h("dt", {}, ...keys.split(" ").map((key) => (/^[–+]$/.test(key) ? `${key} ` : h("kbd", {}, key)))), h("dd", {}, what)));
  return h(
    "dialog",
    { class: "help", "aria-label": "Keys" },
    h("form", { method: "dialog" }, h("h2", {}, "Keys"), h("dl", {}, ...rows), h("button", { class: "primary" }, "Close")),
  );
}

/** Ask for a server's API key. */
export function keyDialog(): Promise<string> {
  const input = h("input", { type: "password", name: "key", required: true, autocomplete: "off", pattern: "[!-~]+", title: ASCII });
  const dialog = h(
    "dialog",
    { class: "help", "aria-label": "API key" },
    h("form", { method: "dialog" }, h("h2", {}, "API key"), h("p", {}, "This server requires an API key. The page keeps it until you close the tab."), input, h("button", { class: "primary" }, "Use this key")),
  );
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(input.checkValidity() ? input.value : ""); // closed with Esc
    });
  });
}
