"""`recurra eval`: scores, printed and written."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.cli.conftest import measured

from recurra.cli import main
from recurra.train import run as scores


def test_eval_prints_and_writes_the_scores(capsys, trained):
    assert main(["eval", trained, "--split", "valid", "--checkpoint", "last"]) == 0
    assert "accuracy" in capsys.readouterr().out
    written = json.loads((Path(trained) / "eval-valid.json").read_text())
    assert written["step"] == 12
    assert written["loss"] == float(measured(Path(trained))[-1]["valid_loss"])


def test_a_temperature_is_given_or_chosen_on_the_validation_split(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    assert main(["eval", str(folder), "--split", "valid"]) == 0
    assert main(["eval", str(folder), "--split", "valid", "--temperature", "0.5"]) == 0
    plain, given = (json.loads((folder / f"eval-valid{name}.json").read_text()) for name in ("", "-temperature-0.5"))
    assert (plain["changes"], given["changes"]) == ({}, {"temperature": 0.5})
    assert main(["eval", str(folder), "--split", "valid", "--temperature", "valid"]) == 0
    (path,) = {*folder.glob("eval-valid-temperature-*")} - {folder / "eval-valid-temperature-0.5.json"}
    assert json.loads(path.read_text())["loss"] <= min(plain["loss"], given["loss"])


def test_a_temperature_at_the_end_of_what_is_tried_is_said(capsys, monkeypatch, trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    words = ["eval", str(folder), "--split", "valid", "--temperature", "valid"]
    for found, said in ((0.3, "T = 0.3 is an end of"), (2.0, ""), (8.0, "T = 8 is an end of what was tried, 0.3 to 8")):
        monkeypatch.setattr("recurra.train.task.best_temperature", lambda *_, found=found: found)
        assert main(words) == 0
        written = capsys.readouterr().err
        assert said in written
        assert written.count("\n") == (1 if said else 0)


def test_words_that_are_no_temperature_are_refused(capsys, trained):
    for word in ("0", "-1", "inf", "hot"):
        with pytest.raises(SystemExit):
            main(["eval", trained, "--temperature", word])
        assert f"{word!r}; expected a number above 0, or valid" in capsys.readouterr().err


def test_the_model_is_moved_to_the_device(monkeypatch, trained):
    """No other device computes here: what is scored is a model moved to float64 in its place."""
    monkeypatch.setattr("recurra.cli.evaluate.chosen_device", lambda wanted, name: torch.float64)
    seen = []
    score = scores.score_run
    monkeypatch.setattr(
        "recurra.cli.evaluate.score_run",
        lambda run, *x, **y: seen.append({p.dtype for p in run.model.parameters()}) or score(run, *x, **y),
    )
    assert main(["eval", trained, "--split", "valid", "--device", "auto"]) == 0
    assert seen == [{torch.float64}]
