"""A language model's step with its transitions among the outputs, for programs that show them."""

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recurra.export.exportable import require_exportable
from recurra.export.programs import FlatModel, StreamProgram, state_tensors, trace, zero_state
from recurra.models import LanguageModelShell
from recurra.models.transitions import mixers_with_transition


class GateLayer(NamedTuple):
    """A layer whose transition a gated program returns.

    layer: its number, from 0. channels: how many numbers it has for each of |a| and the phase.
    """

    layer: int
    channels: int


def gated_step_program(model: LanguageModelShell) -> tuple[StreamProgram, tuple[GateLayer, ...]]:
    """Trace a model for one token of one stream, with its transitions among the outputs.

    The program returns `(logits, magnitudes, phases, *state)`, with |a| and the phases in radians, both (1, C), of all
    layers that are returned beside it, one after the other. A model without transitions has none: C = 0.

    Args:
        model: a language model on the CPU, in float32.

    Raises:
        ValueError: the model cannot be exported; the message says why.
    """
    return trace(model, 1, 1, GatedModel), gate_layers(model)


@torch.no_grad()
def gate_layers(model: LanguageModelShell) -> tuple[GateLayer, ...]:
    """List the layers whose transitions a single step shows."""
    require_exportable(model)
    gated = GatedModel(model)
    _, gates = gated.run(torch.zeros(1, 1, dtype=torch.int64), *zero_state(state_tensors(model), 1))
    return tuple(GateLayer(layer, magnitude.shape[-1]) for layer, (magnitude, _) in zip(gated.mixers, gates))


class GatedModel(FlatModel):
    """A language model whose state is a list of real tensors, and which returns its transitions after the logits."""

    def __init__(self, model: LanguageModelShell) -> None:
        super().__init__(model)
        self.mixers = mixers_with_transition(model, step_by_step=True) if hasattr(model, "blocks") else {}

    def forward(self, tokens: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Return the logits, |a| and the phases of all layers, and the next state."""
        (logits, *last), gates = self.run(tokens, *state)
        none = logits[:, -1, :0]
        magnitudes, phases = (torch.cat([none, *(pair[which][:, -1] for pair in gates)], -1) for which in (0, 1))
        return logits, magnitudes, phases, *last

    def run(self, tokens: Tensor, *state: Tensor) -> tuple[tuple[Tensor, ...], list[tuple[Tensor, Tensor]]]:
        """Return what the model returns, and the transitions of its layers."""
        gates: list[tuple[Tensor, Tensor]] = []

        def keep(mixer: nn.Module, arguments: tuple[Any, ...]) -> None:
            magnitude, phase = mixer.transition(arguments[0])  # type: ignore[operator]
            gates.append((magnitude.float(), phase.float()))

        with ExitStack() as afterwards:
            for mixer in self.mixers.values():
                afterwards.callback(mixer.register_forward_pre_hook(keep).remove)
            return super().forward(tokens, *state), gates
