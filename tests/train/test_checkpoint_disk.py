"""Checkpoints on a disk that is full, or fails: the last one can be loaded, whatever call fails."""

import resource

import pytest
import torch
from benchmarks.faults.disk import FaultyDisk
from tests.train.conftest import quiet, same_weights
from tests.train.payloads import payload

from recurra.train.checkpoint import CheckpointFolder, load_checkpoint
from recurra.train.run_folder import RunFolder

PAYLOAD = {"model": {"one": torch.zeros(300, 300), "other": torch.ones(200, 300)}}


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
    assert same_weights(resumed, whole)


def weights_at(step):
    return {"position": {"step": step}, "model": {"weight": torch.arange(5000.0) + step}, "average": None}


@pytest.fixture
def run(tmp_path):
    """A run with the checkpoints of steps 1 and 2, of which the next save deletes the first."""
    run = RunFolder(tmp_path / "run")
    for step in (1, 2):
        CheckpointFolder(run.checkpoints).save(step, weights_at(step))
    return run


def last(checkpoints):
    """The step of the last checkpoint, which was read whole."""
    path, saved = checkpoints.load("last")
    step = saved["position"]["step"]
    assert path.name == f"step-{step:010d}.safetensors"
    return step


@pytest.mark.parametrize("fault", ["once", "full", "killed"])
def test_the_last_checkpoint_can_be_loaded_whatever_fails(run, fault):
    checkpoints = CheckpointFolder(run.checkpoints)
    before = {path: path.read_bytes() for path in checkpoints.steps()}
    with FaultyDisk(run.path) as disk:
        checkpoints.save(3, weights_at(3))
    for number in range(len(disk.calls)):
        checkpoints.drop_after(2)
        for path, content in before.items():
            path.write_bytes(content)
        failed = None
        with FaultyDisk(run.path, number, fault) as faulty:
            try:
                checkpoints.save(3, weights_at(3))
            except BaseException as error:
                failed = error
        assert fault == "full" or failed is not None
        assert fault == "killed" or isinstance(failed, (OSError, type(None))), "no error of PyTorch's"
        assert last(checkpoints) == (3 if "rename" in faulty.calls[:number] else 2)
        run.lock()
        run.unlock()
        assert not list(run.checkpoints.glob(".*")), "what was left is removed before the run goes on"
