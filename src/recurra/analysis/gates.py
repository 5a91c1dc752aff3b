"""The transitions of a trained model: |a| and phase by layer, step and channel (GateLoop, Figures 5 and 8)."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from recurra.checks import kind_of, sentence
from recurra.models.shell import evaluation_mode, mixers_with_transition, transition_of


@dataclass(frozen=True, eq=False)
class GateRecord:
    """The state transitions a = |a| exp(i phase) that a model applied to a batch; float32, on the CPU."""

    layers: tuple[int, ...]  # the blocks that were recorded, counted from 0: those whose mixer has a transition
    magnitudes: tuple[Float[Tensor, "B L _"], ...]  # |a| in each of these layers
    phases: tuple[Float[Tensor, "B L _"], ...]  # the phase in radians in each of these layers, as computed: not wrapped
    tokens: Int[Tensor, "B L"]  # the input tokens

    def at_token(self, token: int) -> Bool[Tensor, "B L"]:
        """Mark the steps whose input is this token."""
        return self.tokens == token


class ResetContrast(NamedTuple):
    """Mean |a| over channels and steps whose input is the reset token, and over all other steps: float64, a value per
    recorded layer; and the numbers of these steps."""

    at_resets: Float[Tensor, " layers"]
    elsewhere: Float[Tensor, " layers"]
    n_resets: int
    n_elsewhere: int


def record_gates(model: nn.Module, tokens: Int[Tensor, "B L"], state: Any = None) -> GateRecord:
    """Run a language model over tokens and record the transition of each layer that has one.

    The model runs without gradients and in evaluation mode, and is left unchanged.

    Args:
        model: a `LanguageModel`, or any module called as `model(tokens, state)` that has `blocks`, each with a `mixer`.
            Mixers with a method `transition(x) -> (magnitude, phase)` are recorded; those that set
            `transition_looks_back` are called as `transition(x, state)`.
        tokens: the input, on the model's device.
        state: the state before the first step; None starts a stream.

    Raises:
        ValueError: no mixer of the model has a transition.
    """
    mixers = mixers_with_transition(model)
    if not mixers:
        blocks = getattr(model, "blocks", ())
        names = ", ".join(sorted({type(block.mixer).__name__ for block in blocks if hasattr(block, "mixer")}))
        got = f"{kind_of(model)} with {f'the mixers {names}' if names else 'no mixers in blocks'}"
        raise ValueError(sentence("model", got, "a mixer with a method transition(x)"))
    recorded: dict[int, tuple[Tensor, Tensor]] = {}
    with ExitStack() as hooks, evaluation_mode(model), torch.no_grad():
        for layer, mixer in mixers.items():
            hooks.enter_context(mixer.register_forward_pre_hook(partial(_keep_transition, recorded, layer)))
        model(tokens, state)
    return GateRecord(
        layers=tuple(mixers),
        magnitudes=tuple(recorded[layer][0] for layer in mixers),
        phases=tuple(recorded[layer][1] for layer in mixers),
        tokens=_copied(tokens),
    )


def reset_contrast(record: GateRecord, reset_token: int) -> ResetContrast:
    """Measure GateLoop Figure 5's claim: a model that forgets on purpose has |a| near 0 at resets and only there.

    Raises:
        ValueError: none of the record's steps is a reset, or all are.
    """
    resets = record.at_token(reset_token)
    n_resets, n_steps = int(resets.sum()), resets.numel()
    if not 0 < n_resets < n_steps:
        got = f"{reset_token}, the input of {n_resets} of {n_steps} steps"
        hint = "record a longer sequence, or look up the dataset's reset token"
        raise ValueError(sentence("reset_token", got, "the input of some steps but not all", hint))
    return ResetContrast(
        at_resets=torch.stack([magnitude[resets].double().mean() for magnitude in record.magnitudes]),
        elsewhere=torch.stack([magnitude[~resets].double().mean() for magnitude in record.magnitudes]),
        n_resets=n_resets,
        n_elsewhere=n_steps - n_resets,
    )


def _keep_transition(
    recorded: dict[int, tuple[Tensor, Tensor]], layer: int, mixer: nn.Module, arguments: tuple[Any, ...]
) -> None:
    magnitude, phase = transition_of(mixer, *arguments)
    recorded[layer] = (_copied(magnitude), _copied(phase))


def _copied(values: Tensor) -> Tensor:
    """Copy the values: a fixed transition returns views of its parameters."""
    return values.detach().to("cpu", copy=True).contiguous()
