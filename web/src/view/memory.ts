/** What a stream carries, beside the key-value cache of a Transformer of the same shape. */

import { bytes, h, s } from "../dom";
import type { Pane } from "../pane";

const [WIDTH, HEIGHT] = [320, 96];

export class Memory {
  readonly element: HTMLElement;
  private readonly drawing = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  private readonly state = h("strong");
  private readonly cache = h("strong");
  private readonly sentence = h("p", { class: "caption" });

  constructor(private readonly pane: Pane) {
    this.element = h(
      "section",
      { class: "memory", "aria-label": "Memory" },
      h("header", {}, h("h3", {}, "What it carries")),
      h(
        "dl",
        {},
        h("div", { class: "of-state" }, h("dt", {}, "state, constant"), h("dd", {}, this.state)),
        h("div", { class: "of-cache" }, h("dt", {}, "a key-value cache would hold"), h("dd", {}, this.cache)),
      ),
      this.drawing as unknown as Node,
      this.sentence,
    );
  }

  draw(): void {
    const { model, tokens } = this.pane;
    const { stateBytes, cacheBytesPerToken } = model;
    const crossing = stateBytes / cacheBytesPerToken;
    const most = Math.max(32, 1.25 * tokens.length, 2.5 * crossing);
    const top = most * cacheBytesPerToken * 1.02;
    const x = (count: number) => (WIDTH * count) / most;
    const y = (count: number) => HEIGHT - 3 - ((HEIGHT - 6) * count) / top;
    this.state.textContent = bytes(stateBytes);
    this.cache.textContent = bytes(tokens.length * cacheBytesPerToken);
    const at = x(tokens.length);
    this.drawing.replaceChildren(
      s("line", { class: "now", x1: at, x2: at, y1: 0, y2: HEIGHT }),
      s("path", { class: "area", d: `M0 ${y(0)} L${at} ${y(tokens.length * cacheBytesPerToken)} L${at} ${y(0)} Z` }),
      s("line", { class: "cache", x1: 0, y1: y(0), x2: WIDTH, y2: y(most * cacheBytesPerToken) }),
      s("line", { class: "state", x1: 0, y1: y(stateBytes), x2: WIDTH, y2: y(stateBytes) }),
    );
    const times = (tokens.length * cacheBytesPerToken) / stateBytes;
    const compared = times >= 1 ? `${times.toFixed(1)} times the state` : `the state is larger up to token ${Math.ceil(crossing)}`;
    this.sentence.textContent = `After ${tokens.length.toLocaleString("en")} tokens: ${compared}. Cache of a Transformer with as many layers and channels, in float16.`;
  }
}
