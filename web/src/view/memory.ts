/** What a stream carries, beside the key-value cache of a Transformer of the same shape. */

import { bytes, h, s } from "../dom";
import type { Pane } from "../pane";

const [LEFT, BOTTOM, HEIGHT] = [52, 92, 110];

export class Memory {
  readonly element: HTMLElement;
  private readonly drawing = s("svg", { "aria-hidden": "true" });
  private readonly state = h("strong");
  private readonly cache = h("strong");
  private readonly sentence = h("p", { class: "caption" });

  constructor(private readonly pane: Pane) {
    this.element = h(
      "section",
      { class: "memory", "aria-label": "Memory" },
      h("header", {}, h("h3", {}, "Memory")),
      h(
        "dl",
        {},
        h("div", { class: "of-state" }, h("dt", {}, "state (constant)"), h("dd", {}, this.state)),
        h("div", { class: "of-cache" }, h("dt", {}, "key-value cache"), h("dd", {}, this.cache)),
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
    const width = Math.max(160, this.element.clientWidth);
    const x = (count: number) => LEFT + ((width - LEFT) * count) / most;
    const y = (count: number) => BOTTOM - ((BOTTOM - 4) * count) / top;
    const cached = tokens.length * cacheBytesPerToken;
    this.state.textContent = bytes(stateBytes);
    this.cache.textContent = bytes(cached);
    const at = x(tokens.length);
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.drawing.replaceChildren(
      s("rect", { class: "field", x: LEFT, y: 0, width: width - LEFT, height: BOTTOM, rx: 6 }),
      ...ticks(top, 3).map((count) => s("text", { x: LEFT - 6, y: y(count), class: "of-bytes" }, count ? bytes(count).replace(".0 ", " ") : "0")),
      ...ticks(most, width / 110).filter((count) => x(count) < width - 70).map((count) => s("text", { x: x(count), y: HEIGHT - 3 }, count.toLocaleString("en"))),
      s("text", { x: width, y: HEIGHT - 3, class: "unit" }, "tokens"),
      s("path", { class: "area", d: `M${x(0)} ${y(0)} L${at} ${y(cached)} L${at} ${y(0)} Z` }),
      s("line", { class: "now", x1: at, x2: at, y1: 0, y2: BOTTOM }),
      s("line", { class: "cache", x1: x(0), y1: y(0), x2: width, y2: y(most * cacheBytesPerToken) }),
      s("line", { class: "state", x1: x(0), y1: y(stateBytes), x2: width, y2: y(stateBytes) }),
    );
    const times = cached / stateBytes;
    const compared = times >= 1
      ? `Now the cache is ${times.toFixed(1)} times the state.`
      : `The state is larger until token ${Math.ceil(crossing).toLocaleString("en")}.`;
    this.sentence.textContent = `${compared} The cache is that of a Transformer with as many layers and channels, in float16.`;
  }
}

/** Round numbers from 0 on, about `count` of them above it. */
function ticks(most: number, count: number): number[] {
  const power = 10 ** Math.floor(Math.log10(most / count));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power * count >= most * 0.999)!;
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, number) => number * step);
}
