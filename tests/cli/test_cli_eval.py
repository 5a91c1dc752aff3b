"""`recurra eval`: scores, printed and written."""

import json
import shutil
from pathlib import Path

from tests.cli.conftest import measured

from recurra.cli import main


def test_eval_prints_and_writes_the_scores(capsys, trained):
    assert main(["eval", trained, "--split", "valid", "--checkpoint", "last"]) == 0
    assert "accuracy" in capsys.readouterr().out
    written = json.loads((Path(trained) / "eval-valid.json").read_text())
    assert written["step"] == 12
    assert written["loss"] == float(measured(Path(trained))[-1]["valid_loss"])
    assert main(["eval", trained, "--split", "valid", "--checkpoint", "last", "--json"]) == 0
    (printed,) = json.loads(capsys.readouterr().out)
    assert {key: printed[key] for key in ("step", "loss", "accuracy")}.items() <= written.items()


def test_a_temperature_is_given_or_chosen_on_the_validation_split(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    assert main(["eval", str(folder), "--split", "valid"]) == 0
    assert main(["eval", str(folder), "--split", "valid", "--temperature", "0.5"]) == 0
    plain, given = (json.loads((folder / f"eval-valid{name}.json").read_text()) for name in ("", "-temperature-0.5"))
    assert (plain["changes"], given["changes"]) == ({}, {"temperature": 0.5})
    assert main(["eval", str(folder), "--split", "valid", "--temperature", "valid"]) == 0
    (path,) = {*folder.glob("eval-valid-temperature-*")} - {folder / "eval-valid-temperature-0.5.json"}
    assert json.loads(path.read_text())["loss"] <= min(plain["loss"], given["loss"])
