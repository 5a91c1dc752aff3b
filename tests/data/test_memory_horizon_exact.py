"""The weights set by hand in recipes/memory-horizon/exact.py."""

import runpy
from pathlib import Path

import torch

from recurra.data.memory_horizon import memory_horizon_targets
from recurra.models.language_model import LanguageModel, LanguageModelConfig


def test_weights_by_hand_answer_up_to_spans_of_116():
    script = runpy.run_path(str(Path(__file__).parents[2] / "recipes" / "memory-horizon" / "exact.py"))
    model = LanguageModel(LanguageModelConfig(6, 51, d_model=64, d_channel_mixing=128)).eval()
    script["set_weights"](model, phase_scale=1.0)
    tokens = torch.randint(0, 5, (4, 250))
    tokens[:, 116] = 5
    tokens[:, 233] = 5
    with torch.inference_mode():
        answers = model(tokens)[0].argmax(-1)
    right = answers == memory_horizon_targets(tokens)
    assert right.all()
