"""`recurra train`: a run from a recipe, and on from where it was stopped."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.run as torchrun
from tests.cli.conftest import RECIPE, failure, measured
from tests.killed_runs import Ending, train_until

from recurra.cli import main, train


def test_train_writes_a_complete_run(trained):
    run = Path(trained)
    assert {path.name for path in run.iterdir()} >= {"config.yaml", "log.jsonl", "summary.json", "checkpoints"}
    rows = measured(run)
    assert [int(row["step"]) for row in rows] == list(range(1, 13))
    assert [row["step"] for row in rows if row["valid_loss"]] == [4, 8, 12]
    assert json.loads((run / "summary.json").read_text())["finished"] is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--training.epoch", "2"], "training.epoch is an unknown key"),
        (["--training.epochs", "0"], "training.epochs is 0; expected at least 1"),
        (["--training.precision", "half"], "training.precision"),
        (["--model.mixer", "nonsense"], "nonsense"),
        (["--training.epochs"], "--training.epochs is the last word; expected a value after it"),
    ],
)
def test_wrong_keys_and_values_leave_no_run(capsys, recipe, tmp_path, words, message):
    run = tmp_path / "run"
    assert message in failure(capsys, "train", recipe, "--run-dir", str(run), *words)
    assert not run.exists()


def test_nothing_is_written_beside_the_data_and_the_cache_is_named(capsys, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "novel.txt").write_text("the cat sat on a mat\n" * 40)
    (tmp_path / "text.yaml").write_text(
        "{experiment: text, model: {n_layer: 1, d_model: 8, mixer_options: {d_qk: 8, d_v: 8, n_heads: 8}},"
        " training: {max_steps: 1, tensorboard: false, accelerator: cpu, threads: 1}}"
    )
    words = ["--data.path", str(corpus), "--data.segment_length", "4", "--data.batch_size", "2"]
    assert main(["train", str(tmp_path / "text.yaml"), "--run-dir", str(tmp_path / "a run"), *words]) == 0
    assert len(list(corpus.iterdir())) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "split corpus at line ends, in bytes: 756 to train, 42 to valid, 42 to test" in lines
    assert f"  recurra generate '{tmp_path / 'a run'}' --prompt \"...\"" in lines
    (said,) = (line for line in lines if line.startswith("cache folder: "))
    cache = Path(said.removeprefix("cache folder: "))
    assert cache.parent == Path(os.environ["XDG_CACHE_HOME"]) / "recurra"
    assert list(cache.glob("train-*.bin"))


@pytest.mark.parametrize(
    "words", [[], ["a.yaml", "--resume", "b"], ["--resume", "a", "--run-dir", "b"], ["a.yaml", "--checkpoint", "best"]]
)
def test_arguments_that_would_be_ignored_are_refused(capsys, words):
    with pytest.raises(SystemExit) as ended:
        main(["train", *words])
    assert ended.value.code == 2
    assert "--resume" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", ["train", "generate"])
def test_torchrun_takes_no_option_for_its_own(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    options = re.findall(r"^  (?:-\w.*, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE)
    assert "--checkpoint" in options
    given = ["--nproc-per-node", "2", "-m", "recurra", command, *[one for one in options if one != "--help"]]
    parsed = torchrun.parse_args(given)
    assert [parsed.training_script, *parsed.training_script_args] == given[3:]


def test_help_shows_every_field_with_its_docstring(capsys, recipe):
    assert main(["train", recipe, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--resume RUN continue the run in this folder" in text
    assert "--training.epochs EPOCHS Passes over the training data. (type: int, default: 3)" in text
    assert "--data.sequence_length" in text


LONGER = ["--training.epochs", "6", "--training.save_every", "7"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Path:
    """A run that was terminated after 10 records, and one that was killed (kill -9) after 18; in one process, for it
    takes seconds to start."""
    folder = tmp_path_factory.mktemp("ended")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE)
    terminated = Ending(signal.SIGTERM, 10, [str(recipe), "--run-dir", str(folder / "terminated")])
    killed = Ending(signal.SIGKILL, 18, [str(recipe), "--run-dir", str(folder / "killed"), *LONGER])
    process = train_until(folder, terminated, killed)
    assert process.status == -signal.SIGKILL, process.said
    (folder / "out").write_text(process.stdout)
    (folder / "err").write_text(process.stderr)
    return folder


def test_a_killed_run_repeats_the_uninterrupted_one_bit_for_bit(ended, recipe, tmp_path):
    """The resumed run logs what the uninterrupted one logged, digit by digit."""
    whole, killed = tmp_path / "whole", Path(shutil.copytree(ended / "killed", tmp_path / "killed"))
    assert main(["train", recipe, "--run-dir", str(whole), *LONGER]) == 0
    assert measured(killed) == measured(whole)[:18]
    assert main(["train", "--resume", str(killed)]) == 0
    assert len(measured(killed)) == 24
    assert measured(killed) == measured(whole)


def test_a_terminated_run_saves_and_says_how_to_go_on(ended):
    run, errors = ended / "terminated", (ended / "err").read_text()
    assert f"status {128 + signal.SIGTERM}" in (ended / "out").read_text().splitlines()
    assert "stopped by SIGTERM at step" in errors
    assert f"recurra train --resume {run}" in errors
    assert json.loads((run / "summary.json").read_text())["finished"] is False
    last = int(measured(run)[-1]["step"])
    assert (run / "checkpoints" / f"step-{last:010d}.safetensors").is_file()


def test_a_damaged_checkpoint_is_refused_and_the_previous_one_works(capsys, trained, tmp_path):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    expected = measured(run)
    last = run / "checkpoints" / "step-0000000012.safetensors"
    last.write_bytes(last.read_bytes()[:-100])
    message = failure(capsys, "train", "--resume", str(run))
    assert str(last) in message
    assert "--checkpoint previous" in message
    assert main(["train", "--resume", str(run), "--checkpoint", "previous"]) == 0
    assert measured(run) == expected


def test_a_command_that_ends_well_leaves_its_group(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "n_launched", lambda: 2)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with train._reporting_together():
            assert dist.is_initialized()
        assert not dist.is_initialized()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
