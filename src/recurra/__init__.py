"""Recurra: recurrent sequence models that train in parallel and run as a stream, from the same weights."""

from typing import TYPE_CHECKING, Any

from recurra import scan, state
from recurra.deltarule import delta_rule
from recurra.gateloop import gate_loop
from recurra.mixers import create_mixer, list_mixers
from recurra.scan import linear_scan

if TYPE_CHECKING:
    from recurra.runs import open_run

__all__ = ["create_mixer", "delta_rule", "gate_loop", "linear_scan", "list_mixers", "open_run", "scan", "state"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `open_run` when it is first asked for: what opens runs takes long to import."""
    if name == "open_run":
        from recurra.runs import open_run

        return open_run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
