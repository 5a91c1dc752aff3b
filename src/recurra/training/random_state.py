"""The random states of Python, NumPy and PyTorch as plain data, so that a resumed run draws the same numbers."""

import random
from typing import Any

import numpy as np
import torch

from recurra.checks import sentence


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
