/** Whether one provider of onnxruntime computes what another one does. */

import type { Outputs } from "./stream";

type Step = (token: number, state: Float32Array[]) => Promise<Outputs>;

const STEPS = 8;

/** The largest difference of the first logits, relative to the largest of them or 1; each goes on from its own state. */
export async function difference(one: Step, other: Step, start: () => Float32Array[], words: number): Promise<number> {
  let largest = 0;
  let states = [start(), start()];
  for (let number = 0; number < STEPS; number++) {
    const token = (number * 7919) % words;
    const [ours, theirs] = [await one(token, states[0]), await other(token, states[1])];
    const scale = theirs.logits.reduce((most, logit) => Math.max(most, Math.abs(logit)), 1);
    for (let at = 0; at < theirs.logits.length; at++) {
      const apart = Math.abs(ours.logits[at] - theirs.logits[at]) / scale;
      if (!(apart <= largest)) largest = apart; // NaN stays
    }
    states = [ours.state, theirs.state];
  }
  return largest;
}
