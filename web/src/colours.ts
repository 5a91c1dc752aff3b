/** The colours of numbers: viridis for |a|, as in the figures of the documentation, and a circle for phases. */

type Rgb = [number, number, number];

const VIRIDIS: Rgb[] = [
  [68, 1, 84], [72, 35, 116], [64, 67, 135], [52, 94, 141], [41, 120, 142], [32, 144, 140],
  [34, 167, 132], [68, 190, 112], [121, 209, 81], [189, 222, 38], [253, 231, 37],
]; // prettier-ignore
const CIRCLE: Rgb[] = [
  [226, 217, 226], [158, 187, 201], [98, 118, 186], [81, 42, 133], [47, 20, 55], [112, 35, 81],
  [178, 93, 84], [204, 162, 137], [226, 217, 226],
]; // prettier-ignore

function table(stops: Rgb[]): Uint8ClampedArray {
  const colours = new Uint8ClampedArray(256 * 4);
  for (let value = 0; value < 256; value++) {
    const at = (value / 255) * (stops.length - 1);
    const first = Math.min(Math.floor(at), stops.length - 2);
    for (let part = 0; part < 3; part++) {
      const [low, high] = [stops[first][part], stops[first + 1][part]];
      colours[4 * value + part] = low + (high - low) * (at - first);
    }
    colours[4 * value + 3] = 255;
  }
  return colours;
}

export const MAGNITUDES = table(VIRIDIS);
export const PHASES = table(CIRCLE);

export function gradient(colours: Uint8ClampedArray): string {
  const stops = [0, 32, 64, 96, 128, 160, 192, 224, 255].map((value) => {
    const [r, g, b] = colours.subarray(4 * value, 4 * value + 3);
    return `rgb(${r} ${g} ${b})`;
  });
  return `linear-gradient(to right, ${stops.join(", ")})`;
}

/** Most surprise that has a colour of its own, in bits. */
export const MOST_BITS = 12;

export function bits(logprob: number | null): number | null {
  return logprob === null ? null : -logprob / Math.LN2;
}

/** How strongly a token is tinted, from 0 to 1. */
export function heat(logprob: number | null): number {
  return Math.min(1, (bits(logprob) ?? 0) / MOST_BITS);
}
