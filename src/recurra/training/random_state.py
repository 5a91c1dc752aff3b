"""The random states of Python, NumPy and PyTorch as plain data, so that a resumed run draws the same numbers."""

import random
from typing import Any

import numpy as np
import torch


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
    kind, words, spare = state["python"]
    random.setstate((kind, tuple(words), spare))
    numpy_state = state["numpy"]
    key = np.asarray(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([generator.cpu() for generator in state["cuda"]])
