/** Where text is typed for one stream or for all, and how the model continues. */

import { h } from "../dom";
import type { Pane } from "../pane";
import type { Workspace } from "../workspace";

export class Composer {
  readonly element: HTMLFormElement;
  readonly text: HTMLTextAreaElement;
  private readonly targets = h("div", { class: "targets", role: "group", "aria-label": "Send to" });
  private readonly send = h("button", { type: "submit", class: "primary" }, "Read and continue");
  private readonly read = h("button", { type: "button", class: "quiet", title: "Read without continuing (Ctrl+Enter)" }, "Read only");

  private readonly more = h("button", { type: "button", class: "quiet more", "aria-expanded": "false" }, "Options");

  constructor(private readonly workspace: Workspace) {
    this.text = h("textarea", {
      rows: 1,
      placeholder: "Type text for the model to read…",
      "aria-label": "Text to read",
      autocomplete: "off",
      keydown: (event: KeyboardEvent) => this.key(event),
      input: () => this.fit(),
    });
    this.read.addEventListener("click", () => void this.submit(false));
    this.element = h(
      "form",
      { class: "composer", submit: (event: SubmitEvent) => (event.preventDefault(), void this.submit(true)) },
      h("div", { class: "line" }, this.text, h("div", { class: "buttons" }, this.send, this.read, this.more)),
      h("div", { class: "options" }, this.targets, this.sampling()),
    );
    this.more.addEventListener("click", () => {
      const isOpen = this.element.classList.toggle("open");
      this.more.setAttribute("aria-expanded", String(isOpen));
    });
    workspace.onChange(() => this.draw());
  }

  draw(): void {
    const { workspace } = this;
    const { texts, targets } = workspace;
    const one = targets.length < texts.length ? targets[0] : null;
    this.element.hidden = !texts.length;
    this.targets.hidden = texts.length < 2;
    const chip = (label: string, isOn: boolean, act: () => void) =>
      h("button", { type: "button", class: "chip", "aria-pressed": String(isOn), click: act }, label);
    const to = (all: boolean, pane = workspace.active) => () => {
      workspace.toAll = all;
      if (pane) workspace.activate(pane);
    };
    this.targets.replaceChildren(
      "to",
      chip("all", !one, to(true)),
      ...texts.map((pane) => chip(pane.letter, pane === one, to(false, pane))),
    );
  }

  private sampling(): HTMLElement {
    const { sampling } = this.workspace.settings;
    const number = (label: string, key: "maxTokens" | "temperature" | "topP", bounds: { min: number; max: number; step: number }) => {
      const input = h("input", { type: "number", value: sampling[key], required: true, ...bounds });
      input.addEventListener("change", () => {
        if (!input.reportValidity()) return;
        this.workspace.set({ sampling: { ...this.workspace.settings.sampling, [key]: Number(input.value) } });
      });
      return h("label", { title: label }, label, input);
    };
    return h(
      "div",
      { class: "sampling", role: "group", "aria-label": "Sampling" },
      number("tokens", "maxTokens", { min: 1, max: 10000, step: 1 }),
      number("temperature", "temperature", { min: 0, max: 5, step: 0.05 }),
      number("top-p", "topP", { min: 0.01, max: 1, step: 0.01 }),
    );
  }

  private async submit(writes: boolean): Promise<void> {
    const text = this.text.value;
    const targets = this.workspace.targets;
    if (targets.some((pane) => pane.isBusy || pane.status === "waiting")) return;
    const going = text ? await this.fed(targets, text) : targets;
    if (writes) await this.workspace.go(going);
  }

  /** The streams that read all of the text. If none read any of it, it can be sent again. */
  private async fed(targets: Pane[], text: string): Promise<Pane[]> {
    const stood = targets.map((pane) => pane.tokens.length);
    this.put("");
    for (const pane of targets) pane.select(null);
    const whole = await this.workspace.feed(targets, { text });
    const isUnread = targets.every((pane, number) => pane.tokens.length === stood[number]);
    if (isUnread && !whole.length && !this.text.value) this.put(text);
    return whole;
  }

  private put(text: string): void {
    this.text.value = text;
    this.fit();
  }

  private key(event: KeyboardEvent): void {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    void this.submit(!(event.ctrlKey || event.metaKey));
  }

  private fit(): void {
    this.text.style.height = "auto";
    this.text.style.height = `${Math.min(this.text.scrollHeight + 2, 180)}px`;
  }
}
