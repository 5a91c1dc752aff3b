"""`recurra info`: show what is installed, what can run here, and what there is to choose from."""

from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import get_args

import torch
from rich.console import Console
from rich.table import Table

from recurra import list_mixers
from recurra.cli.arguments import command_parser
from recurra.models.registry import list_models
from recurra.ops._toolkit.backends import Backend, choose_backend
from recurra.train.checkpoint import versions
from recurra.train.process import hardware, has_native_bfloat16
from recurra.train.task import experiment_names

_LIBRARIES = ("numba", "triton", "lightning-fabric", "tokenizers")


def run(words: Sequence[str]) -> int:
    """Print a table."""
    command_parser("info", "Show versions, backends, mixers, models and experiments.", overrides=False).parse_args(
        words
    )
    table = Table(show_header=False)
    for name, text in _lines():
        table.add_row(name, text)
    Console(markup=False).print(table)
    return 0


def _lines() -> Iterator[tuple[str, str]]:
    """Give the lines of the table: names and texts."""
    yield from versions().items()
    for library in _LIBRARIES:
        yield library, _installed(library)
    for name, value in hardware().items():
        if name != "native_bfloat16":  # below, for each device
            yield name.replace("_", " "), "none" if value is None else str(value)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        yield f"bfloat16 on {device}", _bfloat16(device)
        for backend in get_args(Backend):
            yield f"{backend} on {device}", _availability(backend, device)
    yield "mixers", ", ".join(list_mixers())
    yield "models", ", ".join(entry.name for entry in list_models())
    yield "experiments", ", ".join(experiment_names())


def _bfloat16(device: str) -> str:
    return "native" if has_native_bfloat16(device) else "not native: training.precision auto is 32-true"


def _installed(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"


def _availability(backend: str, device: str) -> str:
    try:
        chosen = choose_backend(backend, torch.device(device))
    except RuntimeError as error:
        return f"no: {error}"
    return "available" if chosen == backend else f"uses {chosen}"
