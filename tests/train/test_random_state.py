import random

import numpy as np
import torch
from tests.train.payloads import payload

from recurra.train._resumable import _random_state, _set_random_state
from recurra.train.checkpoint import _save_checkpoint, load_checkpoint


def draw() -> list[float]:
    return [
        *(random.random() for _ in range(3)),
        random.gauss(0, 1),
        *np.random.random(3),  # noqa: NPY002
        np.random.standard_normal(),  # noqa: NPY002
        *torch.rand(3).tolist(),
        torch.randn(()).item(),
    ]


def test_the_same_numbers_come_again_after_a_trip_through_a_file(tmp_path):
    draw()  # leaves half a pair of normal numbers waiting, in Python's and in NumPy's generator
    _save_checkpoint(tmp_path / "state.safetensors", payload(random=_random_state()))
    expected = draw()
    assert draw() != expected
    _set_random_state(load_checkpoint(tmp_path / "state.safetensors")["random"])
    assert draw() == expected
