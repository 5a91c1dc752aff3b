"""FLOP formulas for torch's counter, handed over once that is loaded: it loads Triton if installed (0.4 s)."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_COUNTER = "torch.utils.flop_counter"
_waiting: list[tuple[Any, Callable[..., int]]] = []
_known: dict[Any, Callable[..., int]] = {}


def flop_formula(operator: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register the function below as `torch.utils.flop_counter.register_flop_formula` does, without loading it.

    Whoever calls the operator calls `hand_over_formulas` first.
    """

    def register(formula: Callable[..., int]) -> Callable[..., int]:
        _waiting.append((operator, formula))
        hand_over_formulas()
        return formula

    return register


def hand_over_formulas() -> None:
    """Give torch's counter the formulas, if it is loaded; counters that were made before get them too."""
    if torch.compiler.is_compiling() or _COUNTER not in sys.modules:
        return
    counter: Any = sys.modules[_COUNTER]
    while _waiting:
        operator, formula = _waiting.pop(0)
        counter.register_flop_formula(operator)(formula)
        _known[operator] = counter.flop_registry[operator]
    for mode in _get_current_dispatch_mode_stack():
        if (registry := getattr(getattr(mode, "counter", None), "flop_registry", None)) is not None:
            registry.update(_known)
