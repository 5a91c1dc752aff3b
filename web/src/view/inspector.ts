/** What is known of one token: its surprise, what the model expected instead, and a fork from there. */

import { bits } from "../colours";
import { h, visible } from "../dom";
import type { Pane } from "../pane";

export class Inspector {
  readonly element = h("section", { class: "inspector", "aria-label": "The selected token" });
  private shown = "";

  constructor(
    private readonly pane: Pane,
    private readonly fork: () => void,
  ) {}

  draw(): void {
    const { pane } = this;
    const step = pane.stepAt(pane.selected);
    const key = `${pane.selected} ${step?.id} ${pane.isBusy} ${step && pane.nameAt(pane.selected!)}`;
    if (key === this.shown) return;
    this.shown = key;
    this.element.hidden = !step;
    if (!step) return this.element.replaceChildren();
    const surprise = bits(step.logprob);
    const share = step.logprob === null ? "" : `, probability ${percent(step.logprob)}`;
    const { first, last } = pane.characterAt(pane.selected!);
    const title = surprise === null ? "is the first token: nothing predicts it" : `${surprise.toFixed(1)} bits of surprisal${share}`;
    this.element.replaceChildren(
      h("p", {}, h("bdi", {}, h("strong", {}, pane.nameAt(pane.selected!))), `${first < last ? "," : ""} ${title}`),
      ...(step.alternatives.length ? [this.expected(step.alternatives, step.id)] : []),
      h(
        "p",
        { class: "actions" },
        h("button", { type: "button", class: "primary small", disabled: pane.isBusy, click: this.fork }, "Fork after this token"),
        h("button", { type: "button", class: "quiet", click: () => pane.select(null) }, "Close"),
      ),
    );
  }

  private expected(alternatives: { id: number; text: string; logprob: number }[], id: number): HTMLElement {
    const rows = alternatives.map((share) =>
      h(
        "li",
        { class: share.id === id ? "taken" : "" },
        h("span", { class: "name" }, visible(share.text)),
        h("span", { class: "bar", style: `--share:${Math.exp(share.logprob).toFixed(4)}` }),
        h("span", { class: "number" }, percent(share.logprob)),
      ),
    );
    return h("ol", { class: "expected", "aria-label": "What the model expected here" }, ...rows);
  }
}

export function percent(logprob: number): string {
  const share = 100 * Math.exp(logprob);
  return share >= 10 ? `${share.toFixed(0)}%` : share >= 0.1 ? `${share.toFixed(1)}%` : "< 0.1%";
}
