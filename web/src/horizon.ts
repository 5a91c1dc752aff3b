/** The Memory Horizon task: what the right answer is at every step. */

/** The target after each token: of the numbers since the last reset, (x0 x_last - x1 x_(last-1) + ...) mod modulus. */
export function targets(tokens: number[], reset: number, modulus: number): number[] {
  let numbers: number[] = [];
  return tokens.map((token) => {
    if (token === reset) {
      numbers = [];
      return 0;
    }
    numbers.push(token);
    let sum = 0;
    for (let first = 0, last = numbers.length - 1; first <= last; first++, last--) {
      const term = first === last ? numbers[first] : numbers[first] * numbers[last];
      sum += first % 2 ? -term : term;
    }
    return ((sum % modulus) + modulus) % modulus;
  });
}

/** How many numbers an answer depends on: the steps since the last reset. */
export function spans(tokens: number[], reset: number): number[] {
  let span = 0;
  return tokens.map((token) => (span = token === reset ? 0 : span + 1));
}
