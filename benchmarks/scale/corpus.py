"""`python -m benchmarks.scale.corpus FOLDER`: write a corpus like WikiText-103 in size of vocabulary and frequencies.

Words are drawn independently from Zipf's law with Mandelbrot's offset, over as many words as WikiText-103 has; lines
are as long as its paragraphs. There is nothing to learn in it but the frequencies: it is for measuring, not for models.
The same arguments give the same files.
"""

import argparse
from pathlib import Path

import numpy as np

WORDS = 267_733  # and <eos>, <unk>
EXPONENT, OFFSET = 1.05, 2.7
WORDS_PER_LINE = 88


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.corpus", description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the training file (default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    words = spelled(np.random.default_rng(arguments.seed))
    for number, (split, size) in enumerate((("valid", 5e-5), ("test", 5e-5), ("train", arguments.gigabytes))):
        write(
            arguments.folder / f"{split}.txt", words, int(size * 1e9), np.random.default_rng([arguments.seed, number])
        )


def spelled(random: np.random.Generator) -> np.ndarray:
    """Spell so many distinct words: the more frequent, the shorter."""
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    found: dict[str, None] = {}
    while len(found) < WORDS:
        length = 2 + min(9, int(np.log(len(found) + 1) / 1.6) + int(random.integers(0, 3)))
        found.setdefault("".join(random.choice(letters, length)))
    return np.array(list(found), dtype=object)


def write(path: Path, words: np.ndarray, n_bytes: int, random: np.random.Generator) -> None:
    weights = 1.0 / (np.arange(WORDS) + OFFSET) ** EXPONENT
    below = np.cumsum(weights / weights.sum())
    with path.open("wb") as file:
        while file.tell() < n_bytes:
            n_words = WORDS_PER_LINE * min(2000, 1 + n_bytes // 1000)
            drawn = words[np.searchsorted(below, random.random(n_words)).clip(0, WORDS - 1)]
            lines = (" ".join(line) for line in drawn.reshape(-1, WORDS_PER_LINE))
            file.write(("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()
