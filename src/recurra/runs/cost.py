"""What the models of recipes and runs cost: FLOPs, parameters and carried bytes, beside the CRT paper's formulas."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recurra.analysis import MeasuredCost, PublishedCost, measured_cost, model_kind, published_cost
from recurra.analysis.plots import CostPoint
from recurra.checks import require_at_least, sentence
from recurra.models import DataSizes, VideoSizes
from recurra.models.outline import outlined
from recurra.runs.run import open_run
from recurra.runs.score_files import AGAIN, find_scores, staleness
from recurra.training import Experiment, load_recipe


class CostRow(NamedTuple):
    """The cost of a recipe's or run's model.

    name: what it was called. kind: of model. published: by the paper's formula; None if the paper has none.
    measured: counted.
    """

    name: str
    kind: str
    n_layer: int
    segment_length: int
    published: PublishedCost | None
    measured: MeasuredCost

    def as_plain(self) -> dict[str, Any]:
        """Convert to what JSON can hold; `published` is None if the paper has no formula."""
        published = self.published._asdict() if self.published else None
        return {**self._asdict(), "published": published, "measured": self.measured._asdict()}


def cost_of(word: str, overrides: Sequence[str] = (), *, vocabulary: int | None = None) -> CostRow:
    """Count the cost of a recipe or a run. No weight is allocated.

    Args:
        word: a recipe, FILE or FILE#VARIANT, or the folder of a run.
        overrides: values set over it.
        vocabulary: the size of the vocabulary; None takes that of the run, or of the recipe's corpus.

    Raises:
        FileNotFoundError: the folder does not contain a run.
        ValueError: the recipe is impossible, its corpus is missing while `vocabulary` is None, or its model is of a
            kind that cannot be counted.
    """
    run = open_run(word, overrides=overrides) if Path(word).is_dir() else None
    experiment = load_recipe(word, overrides) if run is None else run.experiment
    # refuses a model that cannot be counted before its data are opened, or even generated
    experiment.task.n_steps(experiment)
    sizes: DataSizes | VideoSizes
    if vocabulary is not None:
        require_at_least(1, vocabulary=vocabulary)
        sizes = experiment.task.sizes_of_vocabulary(experiment, vocabulary)
    else:
        sizes = _sizes(word, experiment) if run is None else run.sizes()
    with outlined():
        model: Any = experiment.model.build(sizes)
    return model_cost(word, experiment, model)


def model_cost(name: str, experiment: Experiment, model: Any) -> CostRow:
    """Count the cost of an experiment's model.

    Raises:
        ValueError: it is of a kind that cannot be counted.
    """
    n_steps = experiment.task.n_steps(experiment)
    measured = measured_cost(model, n_steps)
    return CostRow(name, model_kind(model), model.config.n_layer, n_steps, published_cost(model), measured)


def scored_perplexity(word: str, overrides: Sequence[str] = ()) -> float:
    """Read the test perplexity that `recurra eval` measured of a run, with the same overrides.

    Raises:
        FileNotFoundError: the folder does not contain a run.
        ValueError: this is not a folder, or the run has not been scored; the message says how to.
    """
    if not Path(word).is_dir():
        raise ValueError(sentence("run", word, "the folder of a run that was scored", "train the recipe first"))
    run = open_run(word, overrides=overrides)
    scores = find_scores(run.folder, "test", run.changes, "perplexity")
    if (scored := scores.get("checkpoint", "best")) != "best":
        raise ValueError(sentence("scores", f"those of the checkpoint {scored}", "those of the best one", AGAIN))
    if came := staleness(run.folder, scores):
        raise ValueError(sentence("scores", came, "those of the run as it is now", AGAIN))
    return float(scores["perplexity"])


def cost_curves(rows: Sequence[CostRow], perplexities: Sequence[float]) -> dict[str, list[CostPoint]]:
    """Group the points of perplexity over FLOPs by kind of model and, if depths differ, by depth."""
    depths = {row.n_layer for row in rows}
    curves: dict[str, list[CostPoint]] = {}
    for row, perplexity in zip(rows, perplexities):
        name = row.kind if len(depths) == 1 else f"{row.kind}, {row.n_layer} layers"
        curves.setdefault(name, []).append(CostPoint(row.segment_length, row.measured.block_flops, perplexity))
    return curves


def _sizes(word: str, experiment: Experiment) -> DataSizes | VideoSizes:
    try:
        return experiment.sizes(experiment.build_data())
    except (OSError, ValueError) as error:
        if not experiment.task.has_tokenizer():
            raise
        raise ValueError(
            f"{word}: {error}\nwithout the corpus, give the size of its vocabulary, as in --vocabulary 10000"
        ) from error
