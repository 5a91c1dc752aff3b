"""Recurra: recurrent sequence models that train in parallel and run as a stream, from the same weights.

Functions and packages are imported when they are first asked for. So `import recurra` alone loads no torch, and
registers no operators: before `torch.export.load`, import the package that has them, such as `recurra.scan`.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from recurra.kernels import fork as _fork  # noqa: F401  notes forks from here on

if TYPE_CHECKING:
    from recurra import scan, state
    from recurra.deltarule import delta_rule
    from recurra.gateloop import gate_loop
    from recurra.mixers import create_mixer, list_mixers
    from recurra.runs import open_run
    from recurra.scan import linear_scan

__all__ = ["create_mixer", "delta_rule", "gate_loop", "linear_scan", "list_mixers", "open_run", "scan", "state"]
__version__ = "0.1.0"

_HOMES = {
    "create_mixer": "mixers",
    "delta_rule": "deltarule",
    "gate_loop": "gateloop",
    "linear_scan": "scan",
    "list_mixers": "mixers",
    "open_run": "runs",
}
"""The package that each function comes from."""


def __getattr__(name: str) -> Any:
    """Import a function that `__all__` names, or a package of ours."""
    if name in _HOMES:
        globals()[name] = getattr(import_module(f"recurra.{_HOMES[name]}"), name)
        return globals()[name]
    if not name.startswith("_") and find_spec(f"recurra.{name}"):
        return import_module(f"recurra.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
