"""What a trained model's gates do: |a| and phase by layer, step and channel (GateLoop, Figures 5 and 8)."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class GateRecord:
    """The state transitions a = |a| exp(i phase) that a model applied to a batch; float32, on the CPU."""

    layers: tuple[int, ...]
    """Which blocks of the model were recorded, counted from 0: those whose mixer has a transition."""
    magnitudes: tuple[Float[Tensor, "B L _"], ...]
    """|a| for each of these layers."""
    phases: tuple[Float[Tensor, "B L _"], ...]
    """The phase in radians for each of these layers, as the layer computed it: not wrapped."""
    tokens: Int[Tensor, "B L"]
    """The input tokens."""

    def at_token(self, token: int) -> Bool[Tensor, "B L"]:
        """Where the input was this token."""
        return self.tokens == token


class ResetContrast(NamedTuple):
    """Mean |a| at the resets against elsewhere, one value per recorded layer.

    at_resets: (n_layers,) float64, mean over channels and over the steps whose input is the reset token.
    elsewhere: (n_layers,) float64, mean over channels and over all other steps.
    n_resets: how many steps the first mean is over.
    n_elsewhere: how many steps the second mean is over.
    """

    at_resets: Float[Tensor, " layers"]
    elsewhere: Float[Tensor, " layers"]
    n_resets: int
    n_elsewhere: int


def record_gates(model: nn.Module, tokens: Int[Tensor, "B L"], state: Any = None) -> GateRecord:
    """Run a language model over tokens and keep the state transition of every layer that has one.

    The model runs without gradients and in evaluation mode; its modes, and everything else about it, are
    afterwards as before.

    Args:
        model: a `recurra.models.LanguageModel`, or any module called as `model(tokens, state)` that has
            `blocks`, each with a `mixer`. A mixer with a method `transition(x) -> (magnitude, phase)` is
            recorded.
        tokens: the input, on the model's device.
        state: what the model carries into the first step; None for the start of a stream.

    Raises:
        ValueError: no mixer of the model has a transition.
        TypeError: the model has no blocks with mixers.
    """
    mixers = _mixers_with_transition(model)
    recorded: dict[int, tuple[Tensor, Tensor]] = {}
    with ExitStack() as afterwards:
        for module in model.modules():
            afterwards.callback(setattr, module, "training", module.training)
        for layer, mixer in mixers.items():
            hook = mixer.register_forward_pre_hook(partial(_keep_transition, recorded, layer))
            afterwards.callback(hook.remove)
        model.eval()
        with torch.no_grad():
            model(tokens, state)
    return GateRecord(
        layers=tuple(mixers),
        magnitudes=tuple(recorded[layer][0] for layer in mixers),
        phases=tuple(recorded[layer][1] for layer in mixers),
        tokens=_copied(tokens),
    )


def transition_magnitudes(model: nn.Module, tokens: Int[Tensor, "B L"]) -> list[Float[Tensor, "B L _"]]:
    """|a| for every layer that has a transition: `record_gates` for who needs nothing else."""
    return list(record_gates(model, tokens).magnitudes)


def reset_contrast(record: GateRecord, reset_token: int) -> ResetContrast:
    """Figure 5's claim in numbers: a model that forgets on purpose has |a| near 0 at resets and only there.

    Raises:
        ValueError: no step, or every step, of the record is a reset.
    """
    resets = record.at_token(reset_token)
    n_resets, n_steps = int(resets.sum()), resets.numel()
    if not 0 < n_resets < n_steps:
        raise ValueError(
            f"reset_token {reset_token} stands at {n_resets} of {n_steps} steps: there must be some with it "
            "and some without; record a longer sequence, or look up the data set's reset token"
        )
    return ResetContrast(
        at_resets=torch.stack([magnitude[resets].double().mean() for magnitude in record.magnitudes]),
        elsewhere=torch.stack([magnitude[~resets].double().mean() for magnitude in record.magnitudes]),
        n_resets=n_resets,
        n_elsewhere=n_steps - n_resets,
    )


def _mixers_with_transition(model: nn.Module) -> dict[int, nn.Module]:
    try:
        mixers = [block.get_submodule("mixer") for block in model.get_submodule("blocks").children()]
    except AttributeError as error:
        name = type(model).__name__
        raise TypeError(f"model must have blocks, each with a mixer; {name}: {error}") from error
    chosen = {layer: mixer for layer, mixer in enumerate(mixers) if callable(getattr(mixer, "transition", None))}
    if not chosen:
        names = sorted({type(mixer).__name__ for mixer in mixers})
        raise ValueError(
            f"model must have a mixer with a transition(x) method, else it has no gates; its mixers: {names}"
        )
    return chosen


def _keep_transition(
    recorded: dict[int, tuple[Tensor, Tensor]], layer: int, mixer: nn.Module, arguments: tuple[Any, ...]
) -> None:
    magnitude, phase = mixer.transition(arguments[0])  # type: ignore[operator]
    recorded[layer] = (_copied(magnitude.float()), _copied(phase.float()))


def _copied(values: Tensor) -> Tensor:
    """The values in memory of their own: a fixed transition hands out views of its parameters."""
    return values.detach().to("cpu", copy=True).contiguous()
