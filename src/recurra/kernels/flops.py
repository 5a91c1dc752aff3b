"""FLOP formulas for torch's counter, handed over when that is loaded: it loads Triton where it is installed (0.4 s)."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_COUNTER = "torch.utils.flop_counter"
_waiting: list[tuple[Any, Callable[..., int]]] = []


def flop_formula(operator: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register the function below as `torch.utils.flop_counter.register_flop_formula` does, without loading it."""

    def register(formula: Callable[..., int]) -> Callable[..., int]:
        _waiting.append((operator, formula))
        if _COUNTER in sys.modules:
            _hand_over(sys.modules[_COUNTER])
        return formula

    return register


def _hand_over(counter: ModuleType) -> None:
    while _waiting:
        operator, formula = _waiting.pop(0)
        counter.register_flop_formula(operator)(formula)


class _WhenLoaded(MetaPathFinder):
    """Finds the counter as the other finders do, and hands the formulas over once it has been run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_hand_over(module: ModuleType) -> None:
                run(module)
                _hand_over(module)

            spec.loader.exec_module = run_and_hand_over  # type: ignore[method-assign]
        return spec


if _COUNTER not in sys.modules:
    sys.meta_path.insert(0, _WhenLoaded())
