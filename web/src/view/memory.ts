/** What a stream carries, beside the key-value cache of a Transformer of the same shape. */

import { bytes, h, s } from "../dom";
import type { Model } from "../engine";
import type { Pane } from "../pane";

const [LEFT, BOTTOM, HEIGHT] = [52, 92, 110];
const MOST_SHOWN = 10_000; // a later crossing is beyond the drawing
const MOST_COUNTED = 1e9;

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
        h("div", { class: "of-state" }, h("dt", {}, this.pane.model.stateGrowth.length ? "state" : "state (constant)"), h("dd", {}, this.state)),
        h("div", { class: "of-cache" }, h("dt", {}, "key-value cache"), h("dd", {}, this.cache)),
      ),
      this.drawing as unknown as Node,
      this.sentence,
    );
  }

  draw(): void {
    const { model, tokens } = this.pane;
    const { cacheBytesPerToken } = model;
    const crossing = crossingOf(model);
    const most = Math.max(32, 1.25 * tokens.length, crossing < MOST_SHOWN ? 2.5 * crossing : 0);
    const top = Math.max(most * cacheBytesPerToken, stateAfter(model, most)) * 1.02;
    const width = Math.max(160, this.element.clientWidth);
    const x = (count: number) => LEFT + ((width - LEFT) * count) / most;
    const y = (count: number) => BOTTOM - ((BOTTOM - 4) * count) / top;
    const cached = tokens.length * cacheBytesPerToken;
    const stateBytes = stateAfter(model, tokens.length);
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
      s("polyline", { class: "state", points: corners(model, most).map((count) => `${x(count)},${y(stateAfter(model, count))}`).join(" ") }),
    );
    const times = cached / stateBytes;
    const compared = times >= 1
      ? `Now the cache is ${times.toFixed(1)} times the state.`
      : `The state is larger${Number.isFinite(crossing) ? ` until token ${Math.ceil(crossing).toLocaleString("en")}` : ""}.`;
    this.sentence.textContent = `${compared} The cache is that of a Transformer with as many layers and channels, in float16.`;
  }
}

/** The bytes of the state after so many tokens. */
function stateAfter(model: Model, count: number): number {
  const steps = (most: number | null) => Math.max(0, Math.min(count, most ?? count) - 1);
  return model.stateGrowth.reduce((sum, each) => sum + each.bytes * steps(each.tokens), model.stateBytes);
}

/** The numbers of tokens, up to `most`, between which the state grows evenly. */
function corners({ stateGrowth }: Model, most: number): number[] {
  const inner = stateGrowth.map(({ tokens }) => tokens ?? most).filter((count) => count > 1 && count < most);
  return [0, 1, ...inner.sort((one, other) => one - other), most];
}

/** The number of tokens from which on the cache is larger; infinite if it never is. */
function crossingOf(model: Model): number {
  const ends = corners(model, MOST_COUNTED).slice(1);
  for (const [index, end] of ends.entries()) {
    const excess = (count: number) => stateAfter(model, count) - count * model.cacheBytesPerToken;
    if (excess(end) > 0) continue;
    const begin = index ? ends[index - 1] : 0;
    return begin + ((end - begin) * excess(begin)) / (excess(begin) - excess(end));
  }
  return Infinity;
}

/** Round numbers from 0 on, about `count` of them above it. */
function ticks(most: number, count: number): number[] {
  const power = 10 ** Math.floor(Math.log10(most / count));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power * count >= most * 0.999)!;
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, number) => number * step);
}
