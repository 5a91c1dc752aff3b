"""`recurra info`: show what is installed, what can run here, and what there is to choose from; needs no extra."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import get_args

import torch

from recurra import list_mixers
from recurra.cli import missing_extra
from recurra.models.registry import list_models
from recurra.ops._toolkit.backends import Backend, choose_backend
from recurra.train._process import hardware, has_native_bfloat16
from recurra.train.checkpoint import versions
from recurra.train.task import experiment_names


def info(arguments: Namespace) -> int:
    for name, text in _lines():
        print(f"{name:<20} {text}")
    return 0


def _lines() -> Iterator[tuple[str, str]]:
    yield from versions().items()
    for library in ("numba", "triton", "lightning-fabric", "tokenizers"):
        yield library, _installed(library)
    for name, value in hardware().items():
        if name != "native_bfloat16":  # below, for each device
            yield name.replace("_", " "), "none" if value is None else str(value)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        native = has_native_bfloat16(device)
        yield f"bfloat16 on {device}", "native" if native else "not native: training.precision auto is 32-true"
        for backend in get_args(Backend):
            yield f"{backend} on {device}", _availability(backend, device)
    yield "mixers", ", ".join(list_mixers())
    yield "models", _listed(lambda: [entry.name for entry in list_models()])
    yield "experiments", _listed(experiment_names)


def _installed(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"


def _availability(backend: str, device: str) -> str:
    try:
        chosen = choose_backend(backend, torch.device(device))
    except RuntimeError as error:
        return f"no: {str(error).partition(': ')[2]}"  # the obstacle, without what Python would take in its place
    return "available" if chosen == backend else f"uses {chosen}"


def _listed(names: Callable[[], Iterable[str]]) -> str:
    try:
        return ", ".join(names())
    except ModuleNotFoundError as error:
        if missing := missing_extra(error):
            return missing
        raise
