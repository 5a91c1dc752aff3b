"""`recurra eval`: scores, printed and written."""

import json
from pathlib import Path

from tests.cli.conftest import measured

from recurra.cli import main


def test_eval_prints_and_writes_the_scores(capsys, trained):
    assert main(["eval", trained, "--split", "valid", "--checkpoint", "last"]) == 0
    assert "accuracy" in capsys.readouterr().out
    scores = json.loads((Path(trained) / "eval-valid.json").read_text())
    assert scores["step"] == 12
    assert scores["loss"] == float(measured(Path(trained))[-1]["valid_loss"])
