"""From a checkpoint back to a run: the random states of all generators, and whether the parts of a checkpoint fit."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recurra.checks import kind_of, sentence
from recurra.files.weights import shape_difference
from recurra.saved_state import state_from_plain
from recurra.training.checkpoint import CheckpointError, Payload
from recurra.training.config import OPTIMIZER_OPTIONS


def resumed_state(saved: Payload, path: Path, model: nn.Module, optimizer: Optimizer, algorithm: str) -> Any:
    """Refuse a checkpoint whose parts do not fit, before any of them is used; return the state that it carries.

    Args:
        saved: the checkpoint's content.
        path: its file, for messages.
        model: the model that continues, with weights of any values.
        optimizer: its optimiser.
        algorithm: the optimiser's name. One that is registered by others may keep tensors of any shape.

    Raises:
        CheckpointError: the optimiser's state is missing, or weights, state or random numbers' states do not fit.
    """
    parts = ("optimizer", "random", "window", "levels", "resumed_at")
    if any(saved.get(part) is None for part in parts):
        came = "a checkpoint without the optimiser's state, as `recurra convert` writes it"
        raise CheckpointError(sentence(str(path), came, "one that training can continue from"))
    weights = [saved["model"]] + ([] if saved["average"] is None else [saved["average"]["weights"]])
    for own in weights:
        if difference := shape_difference(model, own):
            came = f"a checkpoint of another model (it has {difference})"
            raise CheckpointError(sentence(str(path), came, "one of this model"))
    _require_optimizer_state(saved["optimizer"], path, optimizer, any_shape=algorithm not in OPTIMIZER_OPTIONS)
    try:
        for state in saved["random"] if isinstance(saved["random"], list) else [saved["random"]]:  # one for each rank
            require_random_state(state)
        return state_from_plain(saved["state"], model)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _require_optimizer_state(saved: dict[str, Any], path: Path, optimizer: Optimizer, *, any_shape: bool) -> None:
    own = [[tuple(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]
    found = [group["params"] for group in saved["param_groups"]]
    if list(map(len, found)) != list(map(len, own)):
        came = f"one with groups of {list(map(len, found))} parameters"
        raise CheckpointError(sentence(f"the optimiser in {path}", came, f"{list(map(len, own))}, as in this model"))
    shapes = {number: shape for numbers, group in zip(found, own) for number, shape in zip(numbers, group)}
    for number, values in saved["state"].items():
        for name, value in values.items():
            fits = any_shape or not isinstance(value, Tensor) or tuple(value.shape) in ((), shapes.get(number))
            if number not in shapes or not fits:
                expected = f"one of shape {shapes.get(number, 'of no parameter')}, as its parameter"
                raise CheckpointError(
                    sentence(f"{name} of parameter {number} of the optimiser in {path}", kind_of(value), expected)
                )


def random_state() -> dict[str, Any]:
    """Return the states of all generators that training may draw from, as numbers, lists and tensors."""
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - this saves the global generator
    return {
        "python": list(random.getstate()),
        "numpy": {
            **numpy_state,
            "state": {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()},
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned. If the number of CUDA devices differs, their states stay as they are."""
    _set(state, random, np.random, torch.default_generator)
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([generator.cpu() for generator in state["cuda"]])


def require_random_state(state: dict[str, Any]) -> None:
    """Refuse what `random_state` could not have returned, without changing any generator in use.

    Raises:
        ValueError: a generator cannot take its state.
    """
    try:
        _set(state, random.Random(), np.random.RandomState(), torch.Generator())
    except (TypeError, ValueError, LookupError, RuntimeError, OverflowError) as error:
        reason = " ".join(str(error).split())
        came = f"one that a generator does not take ({reason})"
        raise ValueError(sentence("the state of the random numbers", came, "what random_state returned")) from error


def _set(state: dict[str, Any], python: Any, numpy: Any, generator: torch.Generator) -> None:
    kind, words, spare = state["python"]
    python.setstate((kind, tuple(words), spare))
    numpy_state = state["numpy"]
    key = np.asarray(numpy_state["state"]["key"], dtype=np.uint32)
    numpy.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})
    generator.set_state(state["torch"].cpu())
