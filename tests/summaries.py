"""Made-up summaries, for tests of summaries and of the page of results."""

from collections.abc import Callable
from typing import Any

import pytest

from recurra.runs.summary import Summary

TRAINING = {"seed": 3, "precision": "32-true", "epochs": 4}

HORIZON = {
    "experiment": "memory-horizon",
    "data": {"modulus": 51},
    "model": {"mixer": "gateloop", "mixer_options": {"transition": "data", "d_qk": 8}},
    "training": TRAINING,
}
TEXT = {
    "experiment": "text-crt",
    "data": {"segment_length": 5},
    "model": {"n_layer": 2, "d_model": 8, "memory": "gru"},
    "training": TRAINING,
}
COST = {"kind": "CRT-GRU", "n_layer": 2, "segment_length": 5, "measured": {"block_flops": 4_000_000}}


@pytest.fixture
def make_summary() -> Callable[..., Summary]:
    """make_summary(name, config, **fields): a finished run of 4 epochs with 10 updates each."""

    def make(name: str = "a-run", config: dict[str, Any] = HORIZON, **fields: Any) -> Summary:
        settings: dict[str, Any] = {
            "command": "recurra train recipe.yaml",
            "parameters": 1234,
            "finished": True,
            "steps": 40,
            "total_steps": 40,
            "epochs": 4.0,
            "total_epochs": 4.0,
            "unit": "tokens",
            "count": 9000,
            "seconds": 90.0,
            "resumed_at": [],
            "versions": {"torch": "2"},
            "hardware": None,
            "validation": {"best": {"step": 30, "loss": 2.0, "accuracy": 0.5}},
            "scores": {"eval-test": {"accuracy": 0.45678, "perplexity": 61.04}},
            "curve": {"step": [10, 20, 30], "train_loss": [3.0, None, 2.0], "valid_loss": [None, 2.5, 2.0]},
        }
        return Summary(name=name, config=config, **{**settings, **fields})

    return make
