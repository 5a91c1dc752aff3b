"""Drift of recurrences whose matrix state is rounded after every token, beside float32, over 100,000 tokens.

    python -m benchmarks.quantised_states            # some minutes on one thread
    python -m benchmarks.quantised_states --kernel   # compiled steps with `state_dtype="int16"`

Inputs are random, and memories span 10 to 10,000 tokens: the gated delta rule and Mamba-2 have one decay per head,
GateLoop one per key channel. Formats: bfloat16; int8 and int16 with a scale for each row of a head's state; int8 with
the rounding error in int4 or int8 beside it, which is added before the next rounding; and int16 with one scale for each
head. With --kernel, one mixer with the same memories runs as a compiled step, whose int16 states are of this form.
"""

import argparse
import json
from collections.abc import Callable

import torch
from torch import Tensor, nn

from recurra.decoding.steps import CompiledStep, prepare
from recurra.mixers.base import create_mixer
from recurra.models.language_model import LanguageModelConfig

HEADS, D_K, D_V = 4, 64, 64
_Round = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _codes(x: Tensor, most: int, dims: tuple[int, ...] = (-1,)) -> Tensor:
    scale = x.abs().amax(dims, keepdim=True) / most
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
    "int16, one scale per head": (2, lambda x, error: (_codes(x, 32767, (-1, -2)), error)),
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


class OneMixer(nn.Module):
    """A mixer of random vectors, one for each token; its outputs take the place of logits."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = LanguageModelConfig(4096, None, 1, HEADS * D_V)
        self.embedding = nn.Embedding(4096, HEADS * D_V)
        self.mixer = create_mixer(name.partition(",")[0], HEADS * D_V, **MIXERS[name])
        weights = dict(self.mixer.named_parameters())
        with torch.no_grad():  # a step of about 1 for memories of 10 to 10,000 tokens
            weights["A_log" if "A_log" in weights else "log_decay"].copy_(-torch.logspace(1, 4, HEADS).log())
            weights["dt_bias" if "dt_bias" in weights else "step_bias"].fill_(0.5)

    def forward(self, tokens: Tensor, state: object = None) -> tuple[Tensor, object]:
        """Return the mixer's outputs."""
        y, state = self.mixer(self.embedding(tokens), state)
        return y, state


MIXERS: dict[str, dict[str, int | None]] = {
    "gated-delta-net": {"n_heads": HEADS, "d_qk": HEADS * D_K, "d_v": HEADS * D_V},
    "mamba2": {"n_heads": HEADS, "d_state": D_K, "expand": 1},
    "mamba2, without norm": {"n_heads": HEADS, "d_state": D_K, "expand": 1, "norm": None},
}


@torch.inference_mode()
def kernel_drift(name: str, n_tokens: int, seed: int) -> dict[str, float]:
    """The same for compiled steps with int16 states beside those with float32 states."""
    forms = [prepare(OneMixer(name, seed).eval(), state_dtype=dtype) for dtype in ("float32", "int16")]
    assert all(type(form) is CompiledStep for form in forms)
    states, sums, found = [None, None], torch.zeros(2), []
    for t, token in enumerate(torch.randint(4096, (n_tokens, 1, 1))):
        (y, states[0]), (rounded, states[1]) = (form(token, state) for form, state in zip(forms, states))
        if t % (n_tokens // 10) >= n_tokens // 10 - 1000:
            sums += torch.stack([(rounded - y).square().sum(), y.square().sum()])
        if (t + 1) % (n_tokens // 10) == 0:
            found.append(float((sums[0] / sums[1]).sqrt()))
            sums.zero_()
    return {"first": float(f"{found[0]:.2g}"), "last": float(f"{found[-1]:.2g}")}


def main() -> None:
    """Print one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernel", action="store_true", help="compiled steps with int16 states")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in MIXERS if arguments.kernel else ():
        print(json.dumps({name: kernel_drift(name, arguments.tokens, arguments.seed)}), flush=True)
    if arguments.kernel:
        return
    print(json.dumps({"bytes": {name: size for name, (size, _) in FORMATS.items()}}))
    for kind in ("gated delta rule", "Mamba-2", "GateLoop"):
        found = drift(kind, arguments.tokens, arguments.seed)
        print(
            json.dumps({kind: {n: {k: float(f"{x:.2g}") for k, x in e.items()} for n, e in found.items()}}), flush=True
        )


if __name__ == "__main__":
    main()
