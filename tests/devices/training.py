"""Training runs on another device: the curve of the CPU, through validation, checkpoints and resuming."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning_fabric.accelerators import CPUAccelerator
from lightning_fabric.strategies import SingleDeviceStrategy
from tests.devices.elsewhere import DEVICE, NAME
from torch import Tensor

import recurra.train._ranks
from recurra.cli import main
from recurra.train.loop import Trainer
from recurra.train.metrics import read_metrics

HORIZON = """
experiment: memory-horizon
data: {n_samples: 24, sequence_length: 12, batch_size: 8, resets_per_sample: 2}
model: {n_layer: 1, d_model: 8, d_channel_mixing: 8, mixer_options: {d_qk: 8, d_v: 8}}
optimizer: {algorithm: muon, learning_rate: 0.01, gradient_clip: 0.5}
averaging: {start_step: 2}
"""
TEXT = """
experiment: text-crt
data: {path: FOLDER/corpus, batch_size: 2, segment_length: 4, bptt_segments: 2, vocabulary: words}
model:
  {n_layer: 1, d_model: 8, n_heads: 2, d_channel_mixing: 8, memory: ncgru, position: rnn-ncgru, tie_embeddings: true}
"""
VIDEO = """
experiment: motions-crvit
data:
  {path: FOLDER/videos, n_videos: 20, n_motions: 2, frames_per_motion: 3, image_size: 16, n_frames: 3, batch_size: 8,
   workers: 0}
model: {patch_size: 8, n_layer: 1, d_model: 8, n_heads: 2, d_channel_mixing: 8}
"""
TRAINING = """
training:
  {epochs: 6, max_steps: 4, log_every: 1, eval_every: 2, save_every: 2, precision: 32-true, threads: 1,
   tensorboard: false}
"""
RECIPES = {
    "horizon": (HORIZON, []),
    "text": (TEXT, ["--training.accumulate", "2"]),
    "video": (VIDEO, []),
}


class There(CPUAccelerator):
    """The device for Fabric."""

    def setup_device(self, device: torch.device) -> None:
        assert device.type == NAME


def strategy(*_: Any) -> dict[str, Any]:
    return {"strategy": SingleDeviceStrategy(torch.device(DEVICE), accelerator=There())}


@contextmanager
def trained_there() -> Iterator[set[str]]:
    """Train on the device; gives the kinds of device that losses were on."""
    seen: set[str] = set()
    loss = Trainer._loss

    def watched(self: Trainer, *arguments: Any) -> Any:
        found = loss(self, *arguments)
        seen.add(found[0].device.type)
        return found

    with ExitStack() as stack:
        for owner, name, value in (
            (recurra.train._ranks, "fabric_options", strategy),
            (recurra.train._ranks, "chosen_device", lambda *_: "auto"),
            (Trainer, "_loss", watched),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield seen


def curve(run: Path) -> list[list[float]]:
    names = ("train_loss", "valid_loss", "valid_accuracy", "gradient_norm")
    rows = read_metrics(run / "log.jsonl")
    return [[float("nan" if row[name] is None else row[name]) for name in names] for row in rows]


@contextmanager
def interrupted_after(step: int) -> Iterator[None]:
    """Let a run fail once it has a checkpoint of a step."""
    update = Trainer._update

    def fail(self: Trainer, *arguments: Any) -> Tensor:
        if self.position.step == step:
            raise OSError("the power is gone")
        return update(self, *arguments)

    with patch.object(Trainer, "_update", fail):
        yield


def check_training(folder: Path) -> None:
    corpus = folder / "corpus"
    corpus.mkdir()
    for split in ("train", "valid", "test"):
        (corpus / f"{split}.txt").write_text("a cat and a dog\nthe dog saw a cat\nthe cat ran away\n" * 4)
    for name, (text, more) in RECIPES.items():
        print(name, flush=True)
        recipe, here, there = folder / f"{name}.yaml", folder / f"{name}-here", folder / f"{name}-there"
        recipe.write_text(text.replace("FOLDER", str(folder)) + TRAINING)
        assert main(["train", str(recipe), "--run-dir", str(here), *more]) == 0
        with trained_there() as seen:
            with interrupted_after(2):
                assert main(["train", str(recipe), "--run-dir", str(there), *more]) != 0
            assert main(["train", "--resume", str(there)]) == 0
        assert seen == {NAME}
        expected = curve(here)
        assert len(expected) >= 4
        torch.testing.assert_close(curve(there), expected, rtol=1e-4, atol=1e-5, equal_nan=True)
