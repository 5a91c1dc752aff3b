"""Training with several ranks: the same run as with one, whatever holds the model, and however often it was killed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.launched import curve, launch, train, write_corpus, write_recipe

from recurra.state import tensors
from recurra.train.checkpoint import CheckpointFolder, load_checkpoint, scored_weights
from recurra.train.run import open_run
from recurra.train.tasks.text import start_language_model

GATELOOP = {"model": ", mixer_options: {d_qk: 8, d_v: 8}"}
CLIPPED = "optimizer: {gradient_clip: 0.3, learning_rate: 0.02}\naveraging: {start_step: 2, decay: 0.8}"
CRT = {
    "experiment": "text-crt",
    "data": ", bptt_segments: 2",
    "model": ", n_heads: 2, memory: ncgru, position: rnn-ncgru, cutoffs: [5, 12], dropout: 0.0",
}
SHARDED = ["--training.strategy", "fsdp"]
KILL = """
import os, signal
from recurra.train.loop import Trainer
record = Trainer._record
def record_and_die(self, norm):
    if self.position.step == {step} and self.ranks.rank in {ranks}:
        os.kill(os.getpid(), signal.SIGKILL)
    return record(self, norm)
Trainer._record = record_and_die
"""
INTO_FILES = """
import os, sys
sys.stdout = open("{name}-" + os.environ.get("RANK", "0"), "w", encoding="utf-8")
"""
FAIL = """
import os
from recurra.data import TextConfig
build = TextConfig.build
def fail(self, *, rank=0, world_size=1):
    if rank == 1:
        raise ValueError("the disk of rank 1 is red; expected a green one")
    return build(self, rank=rank, world_size=world_size)
TextConfig.build = fail
"""


def write_recipes(folder: Path) -> tuple[Path, Path]:
    corpus = write_corpus(folder / "corpus")
    gateloop = write_recipe(folder / "gateloop.yaml", corpus, **GATELOOP, more=CLIPPED)
    return gateloop, write_recipe(folder / "crt.yaml", corpus, **CRT, more=CLIPPED)


def generate(ranks: int, name: str) -> dict[str, Any]:
    words = ["generate", "one", "--prompt", "w1 w2", "--max-tokens", "12", "--seed", "7", "-n", "5"]
    return {"ranks": ranks, "nodes": 1, "words": words, "before": INTO_FILES.format(name=name)}


def test_several_ranks_train_the_run_of_one(tmp_path):
    """One set of processes for all: what they import costs more than what they train."""
    gateloop, crt = write_recipes(tmp_path)
    said = launch(
        tmp_path,
        train(0, gateloop, "--run-dir", "one"),
        train(2, gateloop, "--run-dir", "two", "--training.asynchronous_saving", "true", nodes=2),
        train(0, crt, "--run-dir", "crt-one"),
        # killed and resumed with more ranks
        train(0, crt, "--run-dir", "crt-more", before=KILL.format(step=3, ranks=[0])),
        train(2, "--resume", "crt-more", *SHARDED),
        train(2, gateloop, "--run-dir", "failed", before=FAIL),
        train(2, crt, "--run-dir", "crt-pieces", "--training.sequence_parallel", 2),
        generate(0, "texts-of-one"),
        generate(2, "texts-of-two"),
        timeout=300,
    ).said
    _check_curves(tmp_path, said, {"one": ["two"], "crt-one": ["crt-more", "crt-pieces"]})
    _check_checkpoints(tmp_path)
    _check_nothing_is_half_written(tmp_path / "two")
    _check_texts(tmp_path, said)
    # one rank speaks, and an error is that of its own rank
    assert said.count("run folder: two\n") == 1
    assert said.count("recurra train: the disk of rank 1 is red; expected a green one\n") == 1
    assert "exit -6" not in said  # no rank waits for what another does not do
    assert "rank 1 exit 2 {'message': 'ValueError: the disk of rank 1 is red" in said


@pytest.mark.slow
def test_other_ranks_train_the_run_of_one(tmp_path):
    gateloop, crt = write_recipes(tmp_path)
    said = launch(
        tmp_path,
        train(0, gateloop, "--run-dir", "one"),
        train(4, gateloop, "--run-dir", "fewer", *SHARDED, "--training.asynchronous_saving", "true",
              before=KILL.format(step=3, ranks=[2])),
        train(2, "--resume", "fewer", "--training.strategy", "ddp"),
        train(0, gateloop, "--run-dir", "more", before=KILL.format(step=3, ranks=[0])),
        train(2, "--resume", "more", *SHARDED),
        train(2, gateloop, "--run-dir", "pieces", "--training.sequence_parallel", 2),
        train(0, crt, "--run-dir", "crt-one"),
        train(2, crt, "--run-dir", "crt-sharded", *SHARDED),
        timeout=300,
    ).said  # fmt: skip
    _check_curves(tmp_path, said, {"one": ["fewer", "more", "pieces"], "crt-one": ["crt-sharded"]})
    _check_nothing_is_half_written(tmp_path / "fewer")


def _check_curves(runs: Path, said: str, same: dict[str, list[str]]) -> None:
    """Losses, the norm of the gradient before clipping, the validation of averaged weights, tokens counted."""
    for one, others in same.items():
        expected = curve(runs / one)
        assert len(expected) == 5
        for several in others:
            np.testing.assert_allclose(curve(runs / several), expected, rtol=1e-5, err_msg=f"{several}\n{said}")


def _check_nothing_is_half_written(run: Path) -> None:
    assert not [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]


def _check_checkpoints(runs: Path) -> None:
    one, several = (CheckpointFolder(runs / name / "checkpoints").load("last")[1] for name in ("crt-one", "crt-more"))
    for name, weight in one["model"].items():
        np.testing.assert_allclose(several["model"][name], weight, rtol=1e-4, atol=1e-5)
    for number, moments in one["optimizer"]["state"].items():
        assert several["optimizer"]["state"][number].keys() == moments.keys()
    states = [list(tensors(checkpoint["state"])) for checkpoint in (one, several)]
    assert states[0]
    for expected, found in zip(*states, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
    # a model starts from what several ranks have saved
    folder = CheckpointFolder(runs / "two" / "checkpoints").best
    assert folder.is_dir()
    model = open_run(runs / "one").model
    assert start_language_model(model, str(folder)).startswith(f"starts from {folder}, step ")
    for name, weight in scored_weights(load_checkpoint(folder)).items():
        assert torch.equal(model.state_dict()[name], weight)
    _check_nothing_is_half_written(runs / "crt-more")
    # a damaged folder is refused
    folder = CheckpointFolder(runs / "crt-more" / "checkpoints").steps()[0]
    file = next(folder.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{file.name} is damaged: its content does not match its digest"):
        load_checkpoint(folder)


def _check_texts(runs: Path, said: str) -> None:
    expected = (runs / "texts-of-one-0").read_text(encoding="utf-8")
    assert [line for line in expected.splitlines() if "---" in line] == [f"--- {n} ---" for n in range(1, 6)]
    assert len(set(expected.split("---")[2::2])) == 5
    assert (runs / "texts-of-two-0").read_text(encoding="utf-8") == expected, said
    assert (runs / "texts-of-two-1").read_text() == ""
    assert said.count("wrote 60 tokens") == 2
