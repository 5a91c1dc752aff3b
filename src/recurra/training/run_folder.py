"""The folder of a run: what lies where, and that no run is overwritten."""

import json
from pathlib import Path
from typing import Any

from recurra.data.files import replacing


class RunFolder:
    """Where one run keeps everything.

    config.yaml     the complete experiment, a recipe in itself
    tokenizer.json  of text: the vocabulary, so that the run can be used where its corpus is not
    classes.txt     of videos: the names of the classes, one a line
    metrics.csv     one row for each report
    tensorboard/    the same for TensorBoard
    checkpoints/    step-*.pt, best.pt
    summary.json    the results at the last checkpoint and at the end, the versions and the hardware
    figures/        what `recurra plot` draws
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.tokenizer = self.path / "tokenizer.json"
        self.classes = self.path / "classes.txt"
        self.metrics = self.path / "metrics.csv"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.summary = self.path / "summary.json"
        self.figures = self.path / "figures"

    def require_new(self) -> None:
        """Raise FileExistsError if a run lives here."""
        if self.config.exists():
            raise FileExistsError(
                f"{self.path} holds a run already; go on with it by `recurra train --resume {self.path}`, "
                "or choose another folder with --run"
            )

    def require_run(self) -> None:
        """Raise FileNotFoundError if no run lives here."""
        if not self.config.is_file():
            raise FileNotFoundError(f"{self.path} holds no run: there is no {self.config}")

    def write_config(self, text: str) -> None:
        """Write config.yaml, and the folder if it is missing."""
        with replacing(self.config) as file:
            file.write(text.encode())

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json."""
        with replacing(self.summary) as file:
            file.write((json.dumps(summary, indent=2) + "\n").encode())
