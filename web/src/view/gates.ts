/** |a| or phase by layer, channel and time, as a stream moves on: Figures 5 and 8 of GateLoop, live. */

import { MAGNITUDES, PHASES, bits, gradient } from "../colours";
import { h } from "../dom";
import type { Step } from "../engine";
import type { Pane } from "../pane";

const GAP = 6;
const LEFT = 46;
const RESORTED = [8, 32, 128, 512];

export class GateMap {
  readonly element: HTMLElement;
  private readonly canvas = h("canvas", { class: "gates-canvas", role: "img" });
  private readonly caption = h("p", { class: "caption", "aria-live": "off" });
  private readonly title = h("h3");
  private readonly ramp = h("span", { class: "ramp", "aria-hidden": "true" });
  private readonly low = h("span");
  private readonly high = h("span");
  private readonly image = document.createElement("canvas");
  private order: number[][] = [];
  private sortedAt = 0;
  private hovered: number | null = null;
  private firstShown = 0;
  private cell = 6;
  /** Height of the bars of surprise above the map; where there are none, of the marks of resets. */
  private readonly above: number;

  constructor(
    private readonly pane: Pane,
    private readonly shows: () => "magnitudes" | "phases",
    toggle: () => void,
  ) {
    this.above = pane.model.task.kind === "text" ? 30 : 10;
    this.element = h(
      "section",
      { class: "gates", "aria-label": "Gates" },
      h(
        "header",
        {},
        this.title,
        h("span", { class: "scale" }, this.low, this.ramp, this.high),
        h("button", { class: "quiet", type: "button", click: toggle, title: "Switch between |a| and phases (V)" }, "|a| / phase"),
      ),
      this.canvas,
      this.caption,
    );
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => {
      this.hovered = null;
      this.draw();
    });
    this.canvas.addEventListener("click", () => this.pane.select(this.hovered === this.pane.selected ? null : this.hovered));
  }

  draw(): void {
    const { pane } = this;
    const isMagnitude = this.shows() === "magnitudes";
    this.title.textContent = isMagnitude ? "Gates |a|" : "Phases";
    this.low.textContent = isMagnitude ? "closed 0" : "0";
    this.high.textContent = isMagnitude ? "1 open" : "2π";
    this.ramp.style.background = gradient(isMagnitude ? MAGNITUDES : PHASES);
    if (!pane.model.gates.length) {
      this.element.classList.add("without");
      this.title.textContent = "Gates";
      this.caption.textContent = "None: this model has no layer that decays its state.";
      return;
    }
    this.paint(isMagnitude);
    this.describe(isMagnitude);
  }

  private get heights(): number[] {
    const { gates } = this.pane.model;
    const each = Math.max(18, Math.min(112, Math.floor(300 / gates.length) - GAP));
    return gates.map(() => each);
  }

  private paint(isMagnitude: boolean): void {
    const { pane, canvas } = this;
    const width = Math.max(120, this.element.clientWidth);
    const left = LEFT;
    const heights = this.heights;
    const height = this.above + GAP + heights.reduce((sum, one) => sum + one + GAP, 0) + 16;
    const scale = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = `${height}px`;
    }
    this.cell = Math.max(pane.model.task.kind === "text" ? 7 : 11, Math.min(16, (width - left) / pane.steps.length));
    const count = Math.min(pane.steps.length, Math.floor((width - left) / this.cell + 1e-6));
    this.firstShown = this.window(count);
    const steps = pane.steps.slice(this.firstShown - pane.first, this.firstShown - pane.first + count);
    const draw = canvas.getContext("2d")!;
    const style = getComputedStyle(this.element);
    draw.setTransform(scale, 0, 0, scale, 0, 0);
    draw.clearRect(0, 0, width, height);
    this.sort();
    this.bars(draw, steps, left, style);
    let top = this.above + GAP;
    draw.imageSmoothingEnabled = false;
    pane.model.gates.forEach(({ layer }, number) => {
      draw.fillStyle = style.getPropertyValue("--field");
      draw.fillRect(left, top, width - left, heights[number]);
      draw.fillStyle = style.getPropertyValue("--muted");
      draw.font = `11px ${style.fontFamily}`;
      draw.textBaseline = "middle";
      draw.fillText(`layer ${layer}`, 0, top + heights[number] / 2);
      this.layer(draw, steps, number, isMagnitude, left, top, heights[number]);
      top += heights[number] + GAP;
    });
    if (!count) draw.fillText("The gates of each token appear here.", left + 12, this.above + GAP + heights[0] / 2);
    this.resets(draw, steps, left, style);
    this.cursor(draw, left, top, style);
    draw.fillStyle = style.getPropertyValue("--muted");
    draw.textBaseline = "top";
    if (count) draw.fillText(`token ${(this.firstShown + 1).toLocaleString("en")}`, left, top);
    const end = (this.firstShown + count).toLocaleString("en");
    if (count * this.cell > 130) draw.fillText(end, left + count * this.cell - draw.measureText(end).width, top);
  }

  /** Which step the map begins with: the last ones, or those around the one that is looked at. */
  private window(count: number): number {
    const { pane } = this;
    const last = pane.tokens.length - count;
    if (pane.selected === null || pane.selected >= last) return last;
    return Math.max(pane.first, Math.min(last, pane.selected - Math.floor(count / 2)));
  }

  private layer(
    draw: CanvasRenderingContext2D, steps: Step[], number: number, isMagnitude: boolean, left: number, top: number, height: number,
  ): void {
    const order = this.order[number];
    if (!steps.length || !order) return;
    const { image } = this;
    image.width = steps.length;
    image.height = order.length;
    const context = image.getContext("2d")!;
    const pixels = context.createImageData(steps.length, order.length);
    const colours = isMagnitude ? MAGNITUDES : PHASES;
    steps.forEach((step, column) => {
      const values = isMagnitude ? step.gates?.magnitudes[number] : step.gates?.phases[number];
      if (!values) return;
      for (let row = 0; row < order.length; row++) {
        const from = 4 * values[order[row]];
        pixels.data.set(colours.subarray(from, from + 4), 4 * (row * steps.length + column));
      }
    });
    context.putImageData(pixels, 0, 0);
    draw.drawImage(image, left, top, steps.length * this.cell, height);
  }

  /** Put channels in the order of their mean |a|, the longest memories on top; anew only now and then. */
  private sort(): void {
    const { steps, model } = this.pane;
    const due = RESORTED.filter((count) => count <= steps.length).pop() ?? 1;
    if (this.order.length && due === this.sortedAt) return;
    const gated = steps.filter((step) => step.gates);
    if (!gated.length) return;
    this.sortedAt = due;
    this.order = model.gates.map((_, number) => {
      const channels = gated[0].gates!.magnitudes[number].length;
      const sums = new Float64Array(channels);
      for (const step of gated) step.gates!.magnitudes[number].forEach((value, channel) => (sums[channel] += value));
      return Array.from(sums.keys()).sort((one, other) => sums[other] - sums[one]);
    });
  }

  private bars(draw: CanvasRenderingContext2D, steps: Step[], left: number, style: CSSStyleDeclaration): void {
    draw.fillStyle = style.getPropertyValue("--hot-solid");
    steps.forEach((step, column) => {
      const surprise = bits(step.logprob);
      if (surprise === null) return;
      const height = Math.max(1, Math.min(1, surprise / 16) * this.above);
      draw.fillRect(left + column * this.cell, this.above - height, this.cell - 1, height);
    });
  }

  /** A triangle above every reset. */
  private resets(draw: CanvasRenderingContext2D, steps: Step[], left: number, style: CSSStyleDeclaration): void {
    const { task } = this.pane.model;
    if (task.kind === "text") return;
    draw.fillStyle = style.getPropertyValue("--ink");
    steps.forEach((step, column) => {
      if (step.id !== task.reset) return;
      const middle = left + (column + 0.5) * this.cell;
      draw.beginPath();
      draw.moveTo(middle - 4, this.above - 6);
      draw.lineTo(middle + 4, this.above - 6);
      draw.lineTo(middle, this.above + 1);
      draw.fill();
    });
  }

  private cursor(draw: CanvasRenderingContext2D, left: number, bottom: number, style: CSSStyleDeclaration): void {
    const box = (position: number | null, colour: string) => {
      if (position === null || position < this.firstShown) return;
      draw.strokeStyle = colour;
      draw.lineWidth = 1.5;
      draw.strokeRect(left + (position - this.firstShown) * this.cell - 0.5, 1, this.cell + 1, bottom - GAP);
    };
    box(this.hovered, style.getPropertyValue("--muted"));
    box(this.pane.selected, style.getPropertyValue("--ink"));
  }

  private hover(event: PointerEvent): void {
    const column = Math.floor((event.offsetX - LEFT) / this.cell);
    const position = this.firstShown + column;
    this.hovered = column >= 0 && position < this.pane.tokens.length ? position : null;
    this.draw();
  }

  private describe(isMagnitude: boolean): void {
    const { pane } = this;
    const position = this.hovered ?? pane.selected ?? (pane.tokens.length ? pane.tokens.length - 1 : null);
    const step = pane.stepAt(position);
    const layers = pane.model.gates.length;
    this.canvas.setAttribute(
      "aria-label",
      `${isMagnitude ? "Gate magnitudes" : "Phases"} of ${layers} layers over the last tokens; channels with the longest memory on top`,
    );
    if (!step?.gates) {
      this.caption.textContent = "Rows are channels, longest memory on top; columns are tokens.";
      return;
    }
    const means = step.gates.magnitudes.map((values) => values.reduce((sum, value) => sum + value, 0) / values.length / 255);
    const shown = means.map((mean) => mean.toFixed(2)).join(" · ");
    const name = pane.model.task.kind === "text" ? `“${pane.nameAt(position!)}”` : step.id === pane.model.task.reset ? "reset" : String(step.id);
    this.caption.textContent = `${name}: mean |a| per layer ${shown}`;
  }
}
