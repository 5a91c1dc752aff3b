"""The optimisers that recipes choose by name."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch.optim import SGD, AdamW, Optimizer

from recurra.checks import sentence
from recurra.registry import Registry
from recurra.training.muon import Muon
from recurra.training.soap import soap

Factory = TypeVar("Factory", bound=Callable[..., Optimizer])

_optimizers: Registry[Callable[..., Optimizer]] = Registry("optimizer")


def register_optimizer(name: str) -> Callable[[Factory], Factory]:
    """Register an optimiser under `name`, for `optimizer.algorithm`.

    It is called as `cls(groups, lr=..., **optimizer.own_options)`, where the groups are those of `parameter_groups`:
    each has its own `lr`, which the schedule changes, and `weight_decay`. Its `state_dict` goes into the checkpoints.

    Raises:
        ValueError: when the name is taken by something else.
    """
    return _optimizers.register(name)  # type: ignore[return-value]


def list_optimizers() -> list[str]:
    """List the names of all registered optimisers."""
    return list(_optimizers)


def optimizer_factory(name: str, options: dict[str, Any]) -> Callable[..., Optimizer]:
    """Return what makes the optimiser of a name.

    Args:
        name: one of `list_optimizers()`.
        options: those it is going to be called with.

    Raises:
        ValueError: the name or an option is unknown; the message lists those that exist.
    """
    factory = _optimizers[name]
    parameters = inspect.signature(factory).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        allowed = [parameter.name for parameter in [*parameters][1:] if parameter.name != "lr"]  # without the groups
        for option in options:
            if option not in allowed:
                others = ", ".join(allowed)
                came = f"options with {option!r} for {name}"
                raise ValueError(sentence("optimizer.own_options", came, f"some of {others}"))
    return factory


register_optimizer("adamw")(partial(AdamW, fused=True))
register_optimizer("sgd")(partial(SGD, fused=True))
register_optimizer("muon")(Muon)
register_optimizer("soap")(soap)
