/** The text of a stream, every token tinted by its surprise. */

import { bits, heat } from "../colours";
import { h, visible } from "../dom";
import type { Step } from "../engine";
import type { Pane } from "../pane";

export class Transcript {
  readonly element: HTMLElement;
  private readonly list: HTMLElement;
  private readonly text = h("div", { class: "tokens" });
  private readonly note = h("p", { class: "note", hidden: true });
  private readonly empty: HTMLElement;
  private shown: Step[] = [];
  private spans: HTMLElement[] = [];
  private marked: HTMLElement | null = null;

  constructor(
    private readonly pane: Pane,
    begin: (text: string) => void,
  ) {
    const examples = pane.model.task.kind === "text" ? (pane.model.task.examples ?? []) : [];
    this.empty = h(
      "div",
      { class: "empty" },
      h("p", {}, `Type the beginning of a text below, and the model continues it${examples.length ? ". Or try one of these:" : "."}`),
      ...examples.map((text) => h("button", { type: "button", class: "example", click: () => begin(text) }, text)),
    );
    this.list = h(
      "div",
      {
        class: "transcript",
        tabindex: 0,
        role: "listbox",
        "aria-label": `Tokens of stream ${pane.letter}. Arrow keys select a token, F forks after it.`,
        "aria-orientation": "horizontal",
        keydown: (event: KeyboardEvent) => this.key(event),
        click: (event: MouseEvent) => this.click(event),
      },
      this.note,
      this.text,
    );
    this.element = h("div", {}, this.empty, this.list);
  }

  draw(): void {
    const { pane } = this;
    const atEnd = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < 60;
    const drawn = this.shown.length;
    this.drop();
    for (let number = this.shown.length; number < pane.steps.length; number++) {
      const span = tokenSpan(pane, pane.first + number);
      if (pane.origin && pane.first + number < pane.origin.position) span.classList.add("shared");
      this.shown.push(pane.steps[number]);
      this.spans.push(span);
      this.text.append(span);
    }
    this.empty.hidden = pane.tokens.length > 0;
    this.list.hidden = !pane.tokens.length;
    this.note.hidden = pane.first === 0;
    this.note.textContent = `The first ${pane.first.toLocaleString("en")} tokens are no longer shown, but the state includes them.`;
    this.mark();
    if (atEnd && pane.isShowingTheEnd && this.shown.length !== drawn) this.list.scrollTop = this.list.scrollHeight;
  }

  /** Remove the spans of steps that the pane has let go. */
  private drop(): void {
    const first = this.pane.steps[0];
    let gone = this.shown.findIndex((step) => step === first);
    if (gone < 0) gone = this.shown.length;
    for (const span of this.spans.splice(0, gone)) span.remove();
    this.shown.splice(0, gone);
  }

  private mark(): void {
    const { pane } = this;
    const span = pane.selected === null ? null : (this.spans[pane.characterAt(pane.selected).last - pane.first] ?? null);
    if (span === this.marked) return;
    this.marked?.classList.remove("chosen");
    this.marked?.removeAttribute("id");
    this.marked?.setAttribute("aria-selected", "false");
    this.marked = span;
    span?.classList.add("chosen");
    span?.setAttribute("aria-selected", "true");
    if (span) {
      span.id = `token-${pane.id}`;
      this.list.setAttribute("aria-activedescendant", span.id);
      const above = span.offsetTop - this.list.offsetTop < this.list.scrollTop;
      const below = span.offsetTop - this.list.offsetTop + span.offsetHeight > this.list.scrollTop + this.list.clientHeight;
      if (above || below) this.list.scrollTop = span.offsetTop - this.list.offsetTop - this.list.clientHeight / 2;
    } else {
      this.list.removeAttribute("aria-activedescendant");
    }
  }

  private click(event: MouseEvent): void {
    const span = (event.target as Element).closest<HTMLElement>(".token");
    const number = span ? this.spans.indexOf(span) : -1;
    const position = number < 0 ? null : this.pane.first + number;
    this.pane.select(position === this.pane.selected ? null : position);
  }

  private key(event: KeyboardEvent): void {
    const { pane } = this;
    const last = pane.tokens.length - 1;
    const now = pane.selected ?? last;
    const moves: Record<string, number | null> = {
      ArrowLeft: pane.selected === null ? last : now - 1,
      ArrowRight: now + 1,
      ArrowUp: this.neighbour(-1),
      ArrowDown: this.neighbour(1),
      Home: pane.first,
      End: last,
      Escape: null,
    };
    if (!(event.key in moves) || last < 0) return;
    event.preventDefault();
    event.stopPropagation();
    pane.select(moves[event.key]);
  }

  /** The token above or below the chosen one. */
  private neighbour(direction: 1 | -1): number {
    const { pane } = this;
    const at = pane.characterAt(pane.selected ?? pane.tokens.length - 1).last - pane.first;
    const here = this.spans[at];
    if (!here) return pane.tokens.length - 1;
    for (let number = at + direction; this.spans[number]; number += direction) {
      const span = this.spans[number];
      if (!span.offsetParent) continue; // a part of a character
      const isOtherLine = Math.abs(span.offsetTop - here.offsetTop) > 4;
      const isThere = direction > 0 ? span.offsetLeft + span.offsetWidth > here.offsetLeft : span.offsetLeft <= here.offsetLeft;
      if (isOtherLine && (isThere || Math.abs(span.offsetTop - here.offsetTop) > 2 * here.offsetHeight)) return pane.first + number;
    }
    return pane.first + (direction > 0 ? this.spans.length - 1 : 0);
  }
}

/** The span of a token. A character of several tokens is in the last one's, with the surprisal of all. */
function tokenSpan(pane: Pane, position: number): HTMLElement {
  const step = pane.stepAt(position)!;
  const { first, last } = pane.characterAt(position);
  const isPart = step.text === "";
  const logprobs = isPart || first === last ? [step.logprob] : pane.steps.slice(first - pane.first, last + 1 - pane.first).map(({ logprob }) => logprob);
  const logprob = logprobs.some((one) => one === null) ? null : logprobs.reduce<number>((sum, one) => sum + one!, 0);
  const [, before, rest] = /^([ \t]*)([^]*)$/.exec(step.text)!;
  const [, word, end] = /^([^]*?)(\n*)$/.exec(rest)!;
  const surprise = bits(logprob);
  const shown = h("span", { class: "word" }, word || (end ? "↵" : ""));
  if (!word && end) shown.classList.add("line-end");
  shown.style.setProperty("--heat", heat(logprob).toFixed(3));
  const name = `${visible(step.text)}${logprobs.length > 1 ? ` (${logprobs.length} tokens)` : ""}`;
  const label = surprise === null ? name : `${name}: ${surprise.toFixed(1)} bits`;
  return h(
    "span",
    {
      class: `token ${step.wasRead ? "read" : "written"}${isPart ? " part" : ""}`,
      role: "option",
      "aria-selected": "false",
      "aria-label": label,
      title: label,
    },
    before,
    shown,
    end,
  );
}
