"""Checkpoints on a disk that is full, or fails."""

import errno
import io
import os
import resource

import pytest
import torch
from rich.console import Console
from tests.training.payloads import payload
from torch import nn

from recurra.training import AveragingConfig, CheckpointFolder, OptimizerConfig, build_optimizer, load_checkpoint
from recurra.training.averaging import WeightAverage
from recurra.training.checkpoint import save_checkpoint
from recurra.training.checkpoint_space import checkpoint_bytes, space_note

PAYLOAD = {"model": {"one": torch.zeros(300, 300), "other": torch.ones(200, 300)}}


def quiet() -> Console:
    return Console(file=io.StringIO())


def test_a_lack_of_room_says_how_much_is_needed_and_how_much_is_free(tmp_path, monkeypatch, file_size_limit):
    monkeypatch.setattr("recurra.training.checkpoint.free_bytes", lambda folder: 1234)
    file_size_limit(100_000)
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    with pytest.raises(OSError, match=r"none yet, so the run starts again") as caught:
        folder.save(1, PAYLOAD)
    folder.save(2, payload(model={}))
    for save in (lambda: folder.save(3, PAYLOAD), lambda: folder.save_best(PAYLOAD)):
        with pytest.raises(OSError, match=r"cannot be written") as caught:
            save()
        said = str(caught.value)
        assert "(File too large; it needs 60" in said
        assert " bytes, and 1,234 are free)" in said
        assert f"continue with `recurra train --resume {tmp_path / 'run'}`" in said
        assert said.endswith(f"the last one, {folder.path / 'step-0000000002.pt'}, is whole")
        assert "unexpected pos" not in repr(caught.value.__context__)
    assert [path.name for path in folder.path.iterdir()] == ["step-0000000002.pt"]
    load_checkpoint(folder.path / "step-0000000002.pt")


def test_how_much_is_needed_is_what_the_file_takes(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "whole.pt", PAYLOAD)
    size = (tmp_path / "whole.pt").stat().st_size

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=rf"No space left on device; it needs {size:,} bytes, and [\d,]+ are free"):
        save_checkpoint(tmp_path / "a.pt", PAYLOAD)


def test_another_failure_does_not_speak_of_room(tmp_path, monkeypatch):
    def broken(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match=r"a\.pt is a checkpoint that cannot be written \(Input/output error\); expected"):
        save_checkpoint(tmp_path / "a.pt", PAYLOAD)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_filled_its_disk_goes_on_where_its_last_checkpoint_was(make_trainer, file_size_limit):
    settings = {"eval_every": 2, "save_every": 2, "epochs": 1}
    whole = make_trainer("whole", **settings)
    whole.fit(quiet())
    trainer = make_trainer("run", **settings)
    update = trainer._update

    def fill_disk_in_step_5():
        if trainer.position.step == 4:
            file_size_limit(3_000)
        return update()

    trainer._update = fill_disk_in_step_5
    with pytest.raises(OSError, match=r"step-0000000004.pt, is whole"):
        trainer.fit(quiet())
    file_size_limit(resource.RLIM_INFINITY)
    resumed = make_trainer("run", **settings)
    resumed.resume("last")
    assert resumed.position.step == 4
    resumed.fit(quiet())
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], weight)


def test_too_little_room_is_said_before_the_first_step(make_trainer, monkeypatch):
    out = io.StringIO()
    trainer = make_trainer(max_steps=1, eval_every=1)
    size = checkpoint_bytes(trainer.model, trainer.experiment.optimizer, trainer.experiment.averaging)
    monkeypatch.setattr("recurra.training.checkpoint_space.free_bytes", lambda folder: 3 * size - 1)
    trainer.fit(Console(file=out))
    first = out.getvalue().splitlines()[0]
    assert first == (
        f"note: a checkpoint of this run takes about {size:,} bytes, and {trainer.checkpoints.path} has "
        f"{3 * size - 1:,} bytes free; make room for 3 of them"
    )
    monkeypatch.setattr("recurra.training.checkpoint_space.free_bytes", lambda folder: 3 * size)
    assert space_note(trainer.checkpoints.path, size) == ""


@pytest.mark.parametrize(
    "optimizer",
    [{}, {"algorithm": "muon"}, {"algorithm": "soap"}, {"algorithm": "sgd"}, {"algorithm": "sgd", "momentum": 0.0}],
)
@pytest.mark.parametrize("averaging", [{}, {"start_step": 0}])
def test_the_size_of_a_checkpoint_is_known_before_it_is_written(tmp_path, optimizer, averaging):
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    model[1].weight = model[0].weight
    algorithm, average = OptimizerConfig(**optimizer), AveragingConfig(**averaging)
    expected = checkpoint_bytes(model, algorithm, average)
    optimizer, average = build_optimizer(model, algorithm), WeightAverage(model, average)
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    average.update(1)
    payload = {name: part.state_dict() for name, part in (("model", model), ("o", optimizer), ("average", average))}
    save_checkpoint(tmp_path / "a.pt", payload)
    assert 0.97 < expected / (tmp_path / "a.pt").stat().st_size < 1.0
