"""A training step of the Memory Horizon model beside the same model without its scan, and beside a peer's model."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.table import Row
from benchmarks.timing import interleaved, median_ratio
from recurra.mixers.base import Mixer, register_mixer
from recurra.models.language_model import LanguageModel, LanguageModelConfig

BATCH, LENGTH, VOCABULARY, OUTPUTS = 32, 1024, 6, 51
TARGETS = {"float32": 0.75, "bfloat16": 0.65}


class NoState(NamedTuple):
    """Nothing is carried."""


@register_mixer("benchmark-without-scan")
class WithoutScan(Mixer):
    """The GateLoop layer with its recurrence left out: y = q k v sigmoid(gamma) cos(theta), all else equal."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model, NoState)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.transition = nn.Linear(d_model, 2 * d_model)
        self.output_projection = nn.Linear(d_model, d_model)

    def mix(self, x: Tensor, state: NoState, mask: None) -> tuple[Tensor, NoState]:
        q, k, v = self.qkv(x).chunk(3, -1)
        gamma, theta = self.transition(x).chunk(2, -1)
        return self.output_projection(q * k * v * torch.sigmoid(gamma) * torch.cos(theta)), state


def _model(mixer: str) -> nn.Module:
    """The model of GateLoop's Table 3."""
    return LanguageModel(LanguageModelConfig(VOCABULARY, OUTPUTS, 4, 64, 128, mixer=mixer))


class _Peer(nn.Module):
    """gateloop-transformer's own model brought to the same size and parts; it has no state."""

    def __init__(self) -> None:
        super().__init__()
        from gateloop_transformer import Transformer

        self.model = Transformer(
            num_tokens=VOCABULARY,
            dim=64,
            depth=4,
            heads=64,
            dim_head=1,
            ff_mult=2,
            use_gate_looped_attn=True,
            attn_add_swish_gating=False,
            checkpoint_gate_looped_attn=False,  # keeps activations, as ours does, instead of computing them twice
        )
        self.head = nn.Linear(VOCABULARY, OUTPUTS)

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        return self.head(self.model(tokens)), None


def _step(model: nn.Module, precision: str) -> Callable[[], None]:
    tokens, targets = torch.randint(VOCABULARY, (BATCH, LENGTH)), torch.randint(OUTPUTS, (BATCH * LENGTH,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            logits, _ = model(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return run


def measure(rounds: int, peers: bool) -> Iterator[Row]:
    """Yield rows whose ratio is tokens/s over those of the model without scan (of the peer, in its own row)."""
    for precision, target in TARGETS.items():
        models = {"without scan": _model("benchmark-without-scan"), "GateLoop": _model("gateloop")}
        if peers and precision == "float32":
            models["gateloop-transformer"] = _Peer()
        steps = {name: _step(model, precision) for name, model in models.items()}
        seconds = interleaved(steps, rounds=max(3, rounds // 3))
        for name, times in seconds.items():
            row = Row(f"training step, {precision}", name, times, median_ratio(seconds["without scan"], times))
            row.name += f" ({BATCH * LENGTH / sorted(times)[len(times) // 2]:,.0f} tokens/s)"
            if name == "GateLoop":
                row.target, row.sense = target, "at least"
            yield row
        if "gateloop-transformer" in seconds:
            faster = median_ratio(seconds["gateloop-transformer"], seconds["GateLoop"])
            name = "GateLoop over gateloop-transformer"
            yield Row(f"training step, {precision}", name, seconds["GateLoop"], faster, 2.0, "at least")
