"""Checkpoints on a disk that is full, or fails."""

import io
import resource

import pytest
import torch
from rich.console import Console
from tests.train.payloads import payload

from recurra.train.checkpoint import CheckpointFolder, load_checkpoint

PAYLOAD = {"model": {"one": torch.zeros(300, 300), "other": torch.ones(200, 300)}}


def quiet() -> Console:
    return Console(file=io.StringIO())


def test_a_lack_of_room_says_how_much_is_needed_and_how_much_is_free(tmp_path, monkeypatch, file_size_limit):
    monkeypatch.setattr("recurra.train.checkpoint.free_bytes", lambda folder: 1234)
    file_size_limit(100_000)
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    with pytest.raises(OSError, match=r"none yet, so the run starts again") as caught:
        folder.save(1, PAYLOAD)
    folder.save(2, payload(model={}))
    for save in (lambda: folder.save(3, PAYLOAD), lambda: folder.save_best(PAYLOAD)):
        with pytest.raises(OSError, match=r"cannot be written") as caught:
            save()
        said = str(caught.value)
        assert "(File too large; it needs about 60" in said
        assert " bytes, and 1,234 are free)" in said
        assert f"continue with `recurra train --resume {tmp_path / 'run'}`" in said
        assert said.endswith(f"the last one, {folder.path / 'step-0000000002.safetensors'}, is whole")
    assert [path.name for path in folder.path.iterdir()] == ["step-0000000002.safetensors"]
    load_checkpoint(folder.path / "step-0000000002.safetensors")


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
    with pytest.raises(OSError, match=r"step-0000000004.safetensors, is whole"):
        trainer.fit(quiet())
    file_size_limit(resource.RLIM_INFINITY)
    resumed = make_trainer("run", **settings)
    resumed.resume("last")
    assert resumed.position.step == 4
    resumed.fit(quiet())
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], weight)
