/** Memory Horizon as a game: numbers and resets go in, and the model's answer stands beside the right one. */

import { h } from "../dom";
import type { Step } from "../engine";
import { spans, targets } from "../horizon";
import type { Pane } from "../pane";
import { percent } from "./inspector";

const AT_RANDOM = 20;

export class Board {
  readonly element: HTMLElement;
  private readonly tape = h("ol", { class: "tape", tabindex: 0, "aria-label": "The sequence, with the model's answers" });
  private readonly score = h("p", { class: "score", "aria-live": "polite" });
  private readonly task;
  private readonly examples: HTMLElement;
  private shown: Step[] = [];
  private readonly cells: HTMLElement[] = [];

  constructor(private readonly pane: Pane) {
    const { task } = pane.model;
    if (task.kind !== "memory-horizon") throw new Error("the model is not one of Memory Horizon");
    this.task = task;
    const keys = Array.from({ length: task.largest + 1 }, (_, number) =>
      h("button", { type: "button", class: "key", click: () => this.play([number]) }, String(number)),
    );
    const { largest, reset } = task;
    const examples = [[1, 2, 3, 4], [2, 2, 2, 2, 2, 2], [1, 2, 3, reset, 1, 2]].map((tokens) => {
      const played = tokens.map((token) => (token === reset ? reset : Math.min(token, largest)));
      const label = played.map((token) => (token === reset ? "reset" : String(token))).join(" ");
      return h("button", { type: "button", class: "example", click: () => this.play(played) }, label);
    });
    this.examples = h("div", { class: "empty" }, h("p", {}, "Play a number below, or try one of these:"), ...examples);
    this.element = h(
      "div",
      { class: "board", keydown: (event: KeyboardEvent) => this.key(event) },
      h(
        "p",
        { class: "rules" },
        "Play numbers. After each one, the model has to answer ",
        h("em", {}, "x₀·xₙ − x₁·xₙ₋₁ + x₂·xₙ₋₂ − …"),
        ` modulo ${task.modulus}, over all numbers since the last reset. A reset tells it to forget everything.`,
      ),
      this.examples,
      this.tape,
      h(
        "div",
        { class: "keypad", role: "group", "aria-label": "Play" },
        ...keys,
        h("button", { type: "button", class: "key reset", click: () => this.play([task.reset]), title: "R" }, "Reset"),
        h("button", { type: "button", class: "key wide", click: () => this.play(this.drawn()), title: "P" }, `Play ${AT_RANDOM} at random`),
      ),
      this.score,
    );
    this.tape.addEventListener("click", (event) => {
      const cell = (event.target as Element).closest<HTMLElement>("li");
      if (cell) pane.select(pane.first + this.cells.indexOf(cell));
    });
  }

  draw(): void {
    const { pane, task } = this;
    const rights = targets(pane.tokens, task.reset, task.modulus);
    const reached = spans(pane.tokens, task.reset);
    const before = this.shown.length;
    if (this.shown[0] !== pane.steps[0]) {
      this.shown = [];
      this.tape.replaceChildren();
      this.cells.length = 0;
    }
    for (let number = this.shown.length; number < pane.steps.length; number++) {
      const step = pane.steps[number];
      const cell = this.cell(step, rights[pane.first + number]);
      this.shown.push(step);
      this.cells.push(cell);
      this.tape.append(cell);
    }
    this.examples.hidden = pane.tokens.length > 0;
    this.cells.forEach((cell, number) => cell.classList.toggle("chosen", pane.first + number === pane.selected));
    if (this.shown.length !== before) this.tape.scrollTop = this.tape.scrollHeight;
    this.tell(rights, reached);
  }

  private cell(step: Step, right: number): HTMLElement {
    const isReset = step.id === this.task.reset;
    const answer = step.answers[0];
    const isRight = answer?.id === right;
    const sure = answer ? percent(answer.logprob) : "";
    const label = `${isReset ? "reset" : step.id}: the model answers ${answer?.id} (${sure}); correct: ${right}`;
    return h(
      "li",
      { class: `cell ${isReset ? "is-reset" : ""} ${isRight ? "is-right" : "is-wrong"}`, title: label, "aria-label": label },
      h("span", { class: "played" }, isReset ? "↺" : String(step.id)),
      h("span", { class: "answer" }, String(answer?.id ?? "?")),
      h("span", { class: "truth" }, isRight ? "✓" : String(right)),
    );
  }

  private tell(rights: number[], reached: number[]): void {
    const { pane } = this;
    if (!pane.steps.length) {
      this.score.textContent = "Keys: digits play a number, R resets, P plays at random.";
      return;
    }
    const won = pane.steps.filter((step, number) => step.answers[0]?.id === rights[pane.first + number]).length;
    const span = reached[reached.length - 1];
    this.score.textContent = `${won} of ${pane.steps.length} answers correct. ${
      span ? `The next one depends on ${span + 1} numbers.` : "Just reset: nothing to remember."
    }`;
  }

  private drawn(): number[] {
    const { largest, reset } = this.task;
    return Array.from({ length: AT_RANDOM }, () =>
      Math.random() < 0.08 ? reset : Math.floor(Math.random() * (largest + 1)),
    );
  }

  private play(tokens: number[]): void {
    this.pane.select(null);
    void this.pane.feed({ tokens });
  }

  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { pane, task } = this;
    const digit = /^\d$/.test(event.key) ? Number(event.key) : -1;
    const last = pane.tokens.length - 1;
    if (digit >= 0 && digit <= task.largest) this.play([digit]);
    else if (event.key === "r" || event.key === "R") this.play([task.reset]);
    else if (event.key === "p" || event.key === "P") this.play(this.drawn());
    else if (event.key === "ArrowLeft" && last >= 0) pane.select((pane.selected ?? last + 1) - 1);
    else if (event.key === "ArrowRight" && last >= 0) pane.select((pane.selected ?? last) + 1);
    else if (event.key === "Escape") pane.select(null);
    else return;
    event.preventDefault();
  }
}
