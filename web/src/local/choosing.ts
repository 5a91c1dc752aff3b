/** From logits to tokens. */

import type { Sampling } from "../engine";

/** log(sum(exp(logits))). */
export function normaliser(logits: Float32Array): number {
  let largest = -Infinity;
  for (const logit of logits) largest = Math.max(largest, logit);
  let sum = 0;
  for (const logit of logits) sum += Math.exp(logit - largest);
  return largest + Math.log(sum);
}

/** The k largest logits, the largest first. */
export function largest(logits: Float32Array, k: number): number[] {
  const found: number[] = [];
  for (let id = 0; id < logits.length; id++) {
    if (found.length === k && !(logits[id] > logits[found[k - 1]])) continue;
    const place = found.findIndex((other) => logits[id] > logits[other]);
    found.splice(place < 0 ? found.length : place, 0, id);
    if (found.length > k) found.pop();
  }
  return found;
}

/** Choose a token; `random` gives numbers from 0 to 1. */
export function choose(logits: Float32Array, sampling: Sampling, random: () => number): number {
  if (sampling.temperature === 0) return largest(logits, 1)[0];
  const scaled = logits.map((logit) => logit / sampling.temperature);
  if (sampling.topK !== undefined && sampling.topK < scaled.length) {
    const smallest = scaled[largest(scaled, sampling.topK)[sampling.topK - 1]];
    for (let id = 0; id < scaled.length; id++) if (scaled[id] < smallest) scaled[id] = -Infinity;
  }
  const total = normaliser(scaled);
  // All tokens below this share together hold less than 1 - top-p, so that none of them is among the likeliest.
  const least = total + Math.log((1 - sampling.topP) / scaled.length);
  const order: number[] = [];
  for (let id = 0; id < scaled.length; id++) if (scaled[id] >= least && scaled[id] > -Infinity) order.push(id);
  if (sampling.topP < 1) order.sort((one, other) => scaled[other] - scaled[one]);
  let kept = 0;
  let mass = 0;
  while (kept < order.length && mass < sampling.topP) mass += Math.exp(scaled[order[kept++]] - total);
  let left = random() * mass;
  for (let place = 0; place < kept; place++) {
    left -= Math.exp(scaled[order[place]] - total);
    if (left <= 0) return order[place];
  }
  return order[kept - 1];
}

/** Numbers from 0 to 1 that a seed determines: mulberry32. */
export function seeded(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}
