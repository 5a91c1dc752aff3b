"""Drift of recurrences whose matrix state is rounded after every token, beside float32, over 100,000 tokens.

    python -m benchmarks.quantised_states            # some minutes on one thread

Inputs are random, and memories span 10 to 10,000 tokens: the gated delta rule and Mamba-2 have one decay per head,
GateLoop one per key channel. Formats: bfloat16; int8 and int16 with a scale for each row of a head's state; and int8
with the rounding error in int4 or int8 beside it, which is added before the next rounding.
"""

import argparse
import json
from collections.abc import Callable

import torch
from torch import Tensor

HEADS, D_K, D_V = 4, 64, 64
_Round = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _codes(x: Tensor, most: int) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / most
    return (x / scale.clamp_min(1e-30)).round() * scale


def _with_error(most: int) -> _Round:
    def run(x: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        kept = _codes(x + error, 127)
        return kept, _codes(x + error - kept, most)

    return run


FORMATS: dict[str, tuple[float, _Round]] = {
    "bfloat16": (2, lambda x, error: (x.bfloat16().float(), error)),
    "int8": (1, lambda x, error: (_codes(x, 127), error)),
    "int8, int4 residual": (1.5, _with_error(7)),
    "int8, int8 residual": (2, _with_error(127)),
    "int16": (2, lambda x, error: (_codes(x, 32767), error)),
}
"""Bytes of each number of the state, scales apart, and the rounding."""


def _step(kind: str, h: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    h = a * h
    if kind == "gated delta rule":
        v = b * (v - (k.unsqueeze(-2) @ h).squeeze(-2))
    return h + k.unsqueeze(-1) * v.unsqueeze(-2)


def _decays(kind: str, generator: torch.Generator) -> Tensor:
    """Mean log decays: memories of 10 to 10,000 tokens."""
    spans = torch.logspace(1, 4, HEADS)[:, None, None].expand(HEADS, D_K if kind == "GateLoop" else 1, 1)
    return 1 / (spans * torch.rand(spans.shape, generator=generator).add(0.5))


@torch.inference_mode()
def drift(kind: str, n_tokens: int, seed: int) -> dict[str, dict[str, float]]:
    """Relative errors of the outputs of the last 1,000 tokens of the first and the last tenth of the stream."""
    generator = torch.Generator().manual_seed(seed)
    rate, h = _decays(kind, generator), torch.zeros(1 + len(FORMATS), HEADS, D_K, D_V)
    errors = torch.zeros(len(FORMATS), HEADS, D_K, D_V)
    found: dict[str, list[float]] = {name: [] for name in FORMATS}
    sums = torch.zeros(1 + len(FORMATS))
    for t in range(n_tokens):
        draw = torch.randn(4, HEADS, D_K, generator=generator)
        q, k = draw[0] / D_K**0.5, torch.nn.functional.normalize(draw[1], dim=-1)
        a, b = torch.exp(-rate * draw[3, :, :1, None].abs()), torch.sigmoid(draw[3, :, 1:2])
        h = _step(kind, h, q, k, draw[2], a, b)
        y = (q.unsqueeze(-2) @ h).squeeze(-2)
        for number, (_, rounded) in enumerate(FORMATS.values()):
            h[1 + number], errors[number] = rounded(h[1 + number], errors[number])
        if t % (n_tokens // 10) >= n_tokens // 10 - 1000:
            sums[0] += y[0].square().sum()
            sums[1:] += (y[1:] - y[0]).square().flatten(1).sum(1)
        if (t + 1) % (n_tokens // 10) == 0:
            for name, error in zip(FORMATS, (sums[1:] / sums[0]).sqrt().tolist()):
                found[name].append(error)
            sums.zero_()
    return {name: {"first": float(f"{some[0]:.2g}"), "last": float(f"{some[-1]:.2g}")} for name, some in found.items()}


def main() -> None:
    """Print one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps({"bytes": {name: size for name, (size, _) in FORMATS.items()}}))
    for kind in ("gated delta rule", "Mamba-2", "GateLoop"):
        found = drift(kind, arguments.tokens, arguments.seed)
        print(
            json.dumps({kind: {n: {k: float(f"{x:.2g}") for k, x in e.items()} for n, e in found.items()}}), flush=True
        )


if __name__ == "__main__":
    main()
