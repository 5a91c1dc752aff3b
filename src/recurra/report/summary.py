"""What is kept of a run in the repository: settings, scores and curve in a small JSON file, no weights."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from recurra.data.files import replacing
from recurra.training import EXPERIMENTS, TextExperiment

FORMAT = 1
"""Raised when a summary of before can no longer be read."""
DIGITS = 6
"""Significant digits of every measured number."""
TRAINING_POINTS = 200
"""At most so many rows of a curve are kept for their training loss alone."""
CURVE_COLUMNS = ("step", "epoch", "train_loss", "valid_loss", "valid_accuracy")


class SummaryError(ValueError):
    """A summary that cannot be read; the message names the file."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run, finished or not."""

    format: int = FORMAT
    name: str
    command: str
    """What trains it."""
    config: dict[str, Any]
    """The complete experiment, as in its config.yaml; of the places where things lie outside, the name only."""
    parameters: int
    finished: bool
    steps: int
    total_steps: int
    """Updates made, and those that the whole run has."""
    epochs: float
    total_epochs: float
    unit: str
    """tokens or frames: what was counted."""
    count: int
    seconds: float
    """Read in training, and the seconds that it took; evaluation left out."""
    resumed_at: list[int]
    """The steps at which it was interrupted and went on from a checkpoint."""
    versions: dict[str, str]
    hardware: dict[str, Any] | None
    """None where the run did not write down what it ran on."""
    validation: dict[str, dict[str, int | float]]
    """The evaluations `best` and `last`: their step, loss and, where it was measured, accuracy."""
    scores: dict[str, dict[str, Any]]
    """What `recurra eval` left, by its file's name without .json: eval-test, eval-test-segment_length-17."""
    curve: dict[str, list[int | float | None]]
    """Columns of equal length, out of `CURVE_COLUMNS`; None where nothing was measured."""
    spans: dict[str, list[int]] | None = None
    """Of Memory Horizon: n_correct and counts of the test split's positions by memory span, from 0 on."""
    gates: dict[str, Any] | None = None
    """Where gates depend on the data: layers, means (for each of them the mean |a| of every step of one test sequence)
    and resets, the steps of the reset token."""
    cost: dict[str, Any] | None = None
    """Of a text: the model's kind, n_layer and segment_length, and what `recurra cost` says of them."""

    @property
    def is_text(self) -> bool:
        """Whether it is a language model."""
        return issubclass(EXPERIMENTS[self.config["experiment"]], TextExperiment)

    @property
    def seed(self) -> int:
        """What weights and the order of the data are drawn from."""
        return int(self.config["training"]["seed"])

    @property
    def precision(self) -> str:
        """Of training; scores are of float32."""
        return str(self.config["training"]["precision"])

    @property
    def speed(self) -> float:
        """Tokens, or frames, a second of training; NaN where none was measured."""
        return self.count / self.seconds if self.seconds else math.nan

    @property
    def valid_perplexity(self) -> float | None:
        """The perplexity of the best evaluation in training; None before the first one."""
        loss = self.validation.get("best", {}).get("loss")
        return None if loss is None else math.exp(loss)

    def value(self, key: str) -> Any:
        """The value of a dotted key of the configuration; None where it has no such key."""
        found: Any = self.config
        for word in key.split("."):
            found = found.get(word) if isinstance(found, Mapping) else None
        return found

    def score(self, key: str, file: str = "eval-test") -> float | None:
        """What `recurra eval` measured under this key, `accuracy` or `perplexity` say; None where it was not scored."""
        value = self.scores.get(file, {}).get(key)
        return None if value is None else float(value)

    def rows(self) -> list[dict[str, int | float]]:
        """The curve row by row, without what was not measured; with the perplexity beside a text's validation loss."""
        columns = [[(name, value) for value in values] for name, values in self.curve.items()]
        rows = [{name: value for name, value in row if value is not None} for row in zip(*columns)]
        if self.is_text:
            for row in rows:
                if "valid_loss" in row:
                    row["valid_perplexity"] = math.exp(row["valid_loss"])
        return rows


def thinned_curve(
    rows: Sequence[Mapping[str, str]], at_most: int = TRAINING_POINTS
) -> dict[str, list[int | float | None]]:
    """The columns of a curve: every row with a validation, and of the others `at_most`, evenly and with both ends.

    Args:
        rows: of a metrics.csv, in order.
        at_most: 2 or more.

    Raises:
        ValueError: at_most is below 2.
    """
    if at_most < 2:
        raise ValueError(f"at_most must be 2 or more, got {at_most}: a curve keeps both its ends")
    others = [number for number, row in enumerate(rows) if not row.get("valid_loss")]
    if len(others) > at_most:
        others = [others[round(place * (len(others) - 1) / (at_most - 1))] for place in range(at_most)]
    kept = set(others)
    chosen = [row for number, row in enumerate(rows) if number in kept or row.get("valid_loss")]
    columns = {name: [_number(row.get(name)) for row in chosen] for name in CURVE_COLUMNS}
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


def _number(cell: str | None) -> int | float | None:
    if not cell:
        return None
    number = float(cell)
    return int(number) if number.is_integer() and "." not in cell else number


def rounded(value: Any, digits: int = DIGITS) -> Any:
    """The same with every float to so many significant digits; None for what is no finite number."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: rounded(item, digits) for key, item in value.items()}
    return [rounded(item, digits) for item in value] if isinstance(value, (list, tuple)) else value


def write_summary(folder: Path, summary: Summary) -> Path:
    """Write folder/NAME.json, in the place of what was there, and return its path.

    Numbers are rounded, the configuration's excepted. Lists stand on one line each, so that a change is easy to read.
    """
    plain = asdict(summary)
    plain = {key: value if key == "config" else rounded(value) for key, value in plain.items()}
    path = folder / f"{summary.name}.json"
    with replacing(path) as file:
        file.write(("".join(_json_lines(plain)) + "\n").encode())
    return path


def _json_lines(value: Any, indent: str = "") -> Iterator[str]:
    if not isinstance(value, dict) or not value:
        yield json.dumps(value, ensure_ascii=False, allow_nan=False)
        return
    inner = indent + "  "
    before = "{"
    for key, item in value.items():
        yield f"{before}\n{inner}{json.dumps(key)}: "
        yield from _json_lines(item, inner)
        before = ","
    yield "\n" + indent + "}"


def read_summary(path: Path) -> Summary:
    """Read a summary.

    Raises:
        SummaryError: the file is no JSON, or no summary of this version.
        OSError: it cannot be read.
    """
    again = "make it again with `recurra report --add RUN`"
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SummaryError(f"{path} is no JSON ({error}); {again}") from error
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        found = plain.get("format") if isinstance(plain, dict) else type(plain).__name__
        raise SummaryError(f"{path} is no summary of format {FORMAT}, its format is {found!r}; {again}")
    names = {known.name for known in fields(Summary)}
    if differing := sorted(names.symmetric_difference(plain)):
        raise SummaryError(f"{path}: missing or unknown: {', '.join(differing)}; {again}")
    if plain["name"] != path.stem:
        raise SummaryError(f"{path} is the summary of a run called {plain['name']!r}; the two names must be the same")
    return Summary(**plain)


def read_summaries(folder: Path) -> list[Summary]:
    """All summaries of a folder, by name; none where the folder is not there.

    Raises:
        SummaryError: one of them cannot be read.
    """
    return [read_summary(path) for path in sorted(folder.glob("*.json"))]
