"""`recurra info`: show what is installed, what can run here, and what there is to choose from; needs no extra.

`recurra info RUN` and `recurra models`: what a run is, and the models that come with Recurra."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import get_args

import torch

from recurra import list_mixers
from recurra._process import hardware, has_native_bfloat16
from recurra.cli import missing_extra
from recurra.models.registry import list_models
from recurra.ops._toolkit.backends import Backend, choose_backend
from recurra.train.checkpoint import versions
from recurra.train.task import experiment_names


def info(arguments: Namespace) -> int:
    for name, text in _lines() if arguments.run is None else _lines_of_run(arguments.run, arguments.checkpoint):
        print(f"{name:<20} {text}")
    return 0


def models(arguments: Namespace) -> int:
    from recurra.train.shipped import shipped_models

    rows = [("name", "mixer", "parameters", "MB", "data", "score")]
    for name, about in shipped_models().items():
        size = f"{about['bytes'] / 1e6:.1f}"
        rows.append((name, about["mixer"], f"{about['parameters']:,}", size, about["data"], about["score"]))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    return 0


def _lines_of_run(place: str, checkpoint: str) -> Iterator[tuple[str, str]]:
    from recurra.train.run import open_run
    from recurra.train.shipped import card_of

    run = open_run(place, checkpoint=checkpoint)
    yield "run", str(run.folder.path)
    yield "experiment", run.experiment.experiment
    mixer = getattr(run.experiment.model, "mixer", None)
    if mixer is not None:
        yield "mixer", mixer if isinstance(mixer, str) else ", ".join(mixer)
    yield "parameters", f"{sum(parameter.numel() for parameter in run.model.parameters()):,}"
    yield "updates", f"{run.step:,}"
    card = card_of(run.folder.path)
    for name, scores in ({} if card else run.scores).items():  # of any text that was named
        yield name, ", ".join(f"{key} {scores[key]:.4g}" for key in ("perplexity", "accuracy") if scores.get(key))
    if card:
        yield "card", f"\n\n{card}"


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
