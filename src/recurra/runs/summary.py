"""Summaries of runs: small JSON files with settings, scores and curve, without weights, for the repository."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from recurra.checks import require_at_least, sentence
from recurra.evaluation import perplexity
from recurra.files.digests import read_stamped, stamped
from recurra.files.reading import require_fields
from recurra.files.writing import replacing
from recurra.training import experiment_names
from recurra.training.metrics import UNITS
from recurra.training.task import find_experiment

FORMAT = 1
"""Increased when older summaries can no longer be read."""
DIGITS = 6
"""Significant digits of every measured number."""
TRAINING_POINTS = 200
"""Maximum number of rows that a curve keeps for their training loss alone."""
CURVE_COLUMNS = ("step", "epoch", "train_loss", "valid_loss", "valid_accuracy")


class SummaryError(ValueError):
    """A summary that cannot be read; the message names the file."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run, finished or not."""

    format: int = FORMAT
    name: str
    command: str
    """The command that trains it."""
    config: dict[str, Any]
    """The complete experiment, as in config.yaml, but only the name of each path outside the working folder."""
    parameters: int
    finished: bool
    steps: int
    total_steps: int
    """Updates made, and those of the whole run."""
    epochs: float
    total_epochs: float
    unit: str
    """What `count` counts: tokens or frames."""
    count: int
    seconds: float
    """Tokens or frames read in training, and the seconds it took, without evaluation."""
    resumed_at: list[int]
    """The steps at which it was resumed from a checkpoint."""
    versions: dict[str, str]
    hardware: dict[str, Any] | None
    """None if the run did not record what it ran on."""
    validation: dict[str, dict[str, int | float]]
    """The evaluations `best` and `last`: their step, loss and, if it was measured, accuracy."""
    scores: dict[str, dict[str, Any]]
    """What `recurra eval` wrote, by the file's name without .json: eval-test, eval-test-segment_length-17."""
    curve: dict[str, list[int | float | None]]
    """Columns of equal length, a subset of `CURVE_COLUMNS`; None where nothing was measured."""
    spans: dict[str, list[int]] | None = None
    """On Memory Horizon: n_correct and counts of the test split's positions by memory span, from 0 on."""
    gates: dict[str, Any] | None = None
    """If the gates depend on the data: layers, means (for each layer the mean |a| at every step of one test sequence)
    and resets, the steps of the reset token."""
    cost: dict[str, Any] | None = None
    """Over text: the model's kind, n_layer and segment_length, and what `recurra cost` counts for them."""

    @property
    def is_text(self) -> bool:
        """Whether it is a language model."""
        return find_experiment(self.config["experiment"])[0].has_tokenizer()

    @property
    def seed(self) -> int:
        """The seed of the weights and of the order of the data."""
        return int(self.config["training"]["seed"])

    @property
    def precision(self) -> str:
        """The precision of training; scores are always measured in float32."""
        return str(self.config["training"]["precision"])

    @property
    def speed(self) -> float:
        """Tokens or frames per second of training; NaN if none was measured."""
        return self.count / self.seconds if self.seconds else math.nan

    @property
    def valid_perplexity(self) -> float | None:
        """The perplexity of the best evaluation in training, infinity if it overflows; None before the first one."""
        loss = self.validation.get("best", {}).get("loss")
        return None if loss is None else perplexity(loss, 1)

    def value(self, key: str) -> Any:
        """Look up a dotted key of the configuration; None if there is no such key."""
        found: Any = self.config
        for word in key.split("."):
            found = found.get(word) if isinstance(found, Mapping) else None
        return found

    def score(self, key: str, file: str = "eval-test") -> float | None:
        """Look up a score that `recurra eval` measured, such as "accuracy" or "perplexity"; None if it did not."""
        value = self.scores.get(file, {}).get(key)
        return None if value is None else float(value)

    def rows(self) -> list[dict[str, int | float]]:
        """Give the curve row by row, without missing values; rows over text also get the validation perplexity."""
        columns = [[(name, value) for value in values] for name, values in self.curve.items()]
        rows = [{name: value for name, value in row if value is not None} for row in zip(*columns)]
        if self.is_text:
            for row in rows:
                if "valid_loss" in row:
                    row["valid_perplexity"] = perplexity(row["valid_loss"], 1)
        return rows


def thinned_curve(
    rows: Sequence[Mapping[str, Any]], at_most: int = TRAINING_POINTS
) -> dict[str, list[int | float | None]]:
    """Thin a curve: keep every row with a validation, and at most `at_most` others, evenly spaced with both ends.

    Args:
        rows: the rows of a log, in order.
        at_most: at least 2.

    Returns:
        the columns, without those that were never measured.

    Raises:
        ValueError: `at_most` is below 2.
    """
    require_at_least(2, at_most=at_most)
    others = [number for number, row in enumerate(rows) if row.get("valid_loss") is None]
    if len(others) > at_most:
        others = [others[round(place * (len(others) - 1) / (at_most - 1))] for place in range(at_most)]
    kept = set(others)
    chosen = [row for number, row in enumerate(rows) if number in kept or row.get("valid_loss") is not None]
    columns = {name: [row.get(name) for row in chosen] for name in CURVE_COLUMNS}
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


def rounded(value: Any, digits: int = DIGITS) -> Any:
    """Round every float to `digits` significant digits; infinities and NaN become None."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: rounded(item, digits) for key, item in value.items()}
    return [rounded(item, digits) for item in value] if isinstance(value, (list, tuple)) else value


def write_summary(folder: Path, summary: Summary) -> Path:
    """Write FOLDER/NAME.json, over what was there, and return its path.

    Numbers are rounded, except in the configuration. Each list takes one line, which makes changes easy to read.
    """
    plain = asdict(summary)
    plain = {key: value if key == "config" else rounded(value) for key, value in plain.items()}
    path = folder / f"{summary.name}.json"
    with replacing(path) as file:
        file.write(("".join(_json_lines(stamped(plain))) + "\n").encode())
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
        SummaryError: the file is not JSON, or not a summary of this version.
        OSError: it cannot be read.
    """
    again = "write it again with `make report RUNS=FOLDER`"
    try:
        plain = read_stamped(path, version=FORMAT, mend=again)
        require_fields(plain, get_type_hints(Summary), str(path))
    except ValueError as error:
        raise SummaryError(str(error)) from error
    names = {known.name for known in fields(Summary)}
    if differing := sorted(names.symmetric_difference(plain)):
        came = f"{path}, in which these keys are missing or unknown: {', '.join(differing)}"
        raise SummaryError(sentence("summary", came, "those of this version", again))
    if plain["name"] != path.stem:
        came = f"{path}, of a run named {plain['name']!r}"
        raise SummaryError(sentence("summary", came, "one of the run that the file is named after"))
    _require_sound(plain, path)
    return Summary(**plain)


def _require_sound(plain: Mapping[str, Any], path: Path) -> None:
    """Refuse what has the right types, but would fail on the page."""

    def require(condition: bool, name: str, came: object, expected: str) -> None:
        if not condition:
            raise SummaryError(f"{path}: {sentence(name, repr(came), expected)}")

    experiment, training, curve = plain["config"].get("experiment"), plain["config"].get("training"), plain["curve"]
    require(
        experiment in experiment_names(), "config.experiment", experiment, f"one of {', '.join(experiment_names())}"
    )
    is_whole = isinstance(training, dict) and {"seed", "precision"} <= training.keys()
    require(is_whole, "config.training", training, "an object with seed and precision")
    require(plain["unit"] in UNITS, "unit", plain["unit"], f"one of {', '.join(UNITS)}")
    require(set(curve) <= set(CURVE_COLUMNS), "curve", sorted(curve), f"columns among {', '.join(CURVE_COLUMNS)}")
    lengths = [len(values) for values in curve.values()]
    require(len(set(lengths)) <= 1, "curve", lengths, "columns of one length")


def read_summaries(folder: Path) -> list[Summary]:
    """Read all summaries of a folder, by name; none if the folder does not exist.

    Raises:
        SummaryError: one of them cannot be read.
    """
    return [read_summary(path) for path in sorted(folder.glob("*.json"))]
