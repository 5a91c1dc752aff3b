"""A whole checkpoint's payload, small, for tests that need one without a run."""

from typing import Any

import torch

from recurra.train._resumable import _random_state


def payload(**changes: Any) -> dict[str, Any]:
    """All that a checkpoint holds, besides what `save_checkpoint` adds; `changes` replace sections."""
    return {
        "config": {"experiment": "text", "model": {"n_heads": 2, "betas": [0.9, 0.98]}},
        "position": {"step": 7, "epoch": 1, "batch": 2, "tokens": 70, "seconds": 1 / 3},
        "model": {"weight": torch.arange(300.0).reshape(20, 15), "bias": torch.ones(3, dtype=torch.complex64)},
        "average": None,
        "optimizer": {
            "state": {0: {"step": torch.tensor(7.0), "exp_avg": torch.arange(300.0).reshape(20, 15) / 2}},
            "param_groups": [
                {"name": "base", "params": [0], "lr": 0.1, "peak_lr": 0.2, "weight_decay": 0.0, "betas": (0.9, 0.98)}
            ],
        },
        "state": [None, [torch.tensor([1, 2])], 3],
        "window": {"loss": 1.5, "n_targets": 3, "n_tokens": 4, "seconds": 0.25},
        "levels": {"level": 2, "epoch": {"loss": 0.5, "n_targets": 2, "n_tokens": 0, "seconds": 0.0}},
        "scores": {"last": {"step": 7, "loss": 1.25, "accuracy": 0.5}},
        "resumed_at": [3],
        "random": _random_state(),
        **changes,
    }
