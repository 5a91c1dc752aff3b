"""The figures of trained runs, what their models cost, and how gradients pass between their segments."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from recurra._choices import Split
from recurra._files.writing import replacing
from recurra.analysis.cost import MeasuredCost, PublishedCost, measured_cost, model_kind, published_cost
from recurra.analysis.gates import GateRecord, record_gates
from recurra.analysis.gradient_flow import GradientFlow, measure_gradient_flow, memory_rnn
from recurra.analysis.plots.curves import measured_panels, metric_curves
from recurra.analysis.plots.figure import save
from recurra.analysis.plots.gates import gate_magnitudes, gate_phases, magnitude_activations
from recurra.analysis.plots.scores import CostPoint, accuracy_over_span
from recurra.checks import require_at_least, sentence
from recurra.data.memory_horizon import SpanAccuracy
from recurra.mixers.gateloop import GateLoop
from recurra.mixers.gateloop_attention import GateLoopAttention
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformer, CompactRecurrentTransformerState
from recurra.models.registry import DataSizes, VideoSizes, on_meta
from recurra.train.metrics import read_metrics
from recurra.train.recipe import RecipeError, find_recipe, load_recipe, split_variant
from recurra.train.run import AGAIN, Run, find_scores, open_run, staleness
from recurra.train.shipped import find_run


def draw_runs(runs: Sequence[Run], folder: Path | None = None) -> list[Path]:
    """Draw each run's gates or confusion matrix into its own folder, and what compares the runs into one folder.

    Args:
        runs: at least one, of different names.
        folder: for the figures of all runs; None is that of `shared_folder`.

    Returns:
        the files.
    """
    require_different_names(runs)
    # Measure everything before anything is drawn: a run that cannot be read then leaves no figures of the others.
    gates = {run.name: gates_of(run) for run in runs}
    spans = {run.name: run.task.score_by_span(run)[1] for run in runs if run.task.has_spans}
    scores = {run.name: _checked_scores(run, *run.task.drawn_scores) for run in runs if run.task.drawn_scores}
    metrics = _curves(runs)
    files = [file for run in runs for file in draw_gates(run, gates[run.name])]
    for run in runs:
        if run.name in scores:
            files += run.task.figures_of_scores(run, "test", scores[run.name])
    return files + draw_comparison(runs, spans, folder or shared_folder(runs), metrics=metrics)


def shared_folder(runs: Sequence[Run]) -> Path:
    """Locate the figures of all runs: of one run, its own; of several, the folder `figures` beside the first."""
    first = runs[0].folder
    return first.figures if len(runs) == 1 else first.path.resolve().parent / first.figures.name


def require_different_names(runs: Sequence[Run]) -> None:
    """Refuse runs of the same name, which a table or figure could not tell apart."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(sentence("runs", f"several with the names {', '.join(names)}", "folders with different names"))


def _checked_scores(run: Run, *keys: str) -> dict[str, Any]:
    """Read test scores; refuse those of another checkpoint than the run was opened with, and outdated ones."""
    scores = find_scores(run.folder, "test", run.changes, *keys)
    scored = scores.get("checkpoint", run.checkpoint)
    got = "" if scored == run.checkpoint else f"scored with the checkpoint {scored}"
    if got := got or staleness(run.folder, scores):
        raise ValueError(sentence(f"{run.folder.path}", got, f"scores of its {run.checkpoint} checkpoint", AGAIN))
    return scores


def gates_of(run: Run) -> GateRecord | None:
    """Record a model's gates over the first whole test sequence; None for a model without gates."""
    if not any(hasattr(module, "transition") for module in run.model.modules()):
        return None
    return record_gates(run.model, run.task.gate_tokens(run.data.source("test").batch(0, 0)))


def draw_gates(run: Run, record: GateRecord | None) -> list[Path]:
    """Draw Figures 5 and 8 of GateLoop: the magnitudes and phases of the gates over a test sequence."""
    if record is None:
        return []
    return [
        *save(gate_magnitudes(record, reset_token=run.task.reset_token(run)), run.folder.figures, "gate-magnitudes"),
        *save(gate_phases(record), run.folder.figures, "gate-phases"),
    ]


def draw_comparison(
    runs: Sequence[Run],
    spans: Mapping[str, SpanAccuracy],
    folder: Path,
    *,
    metrics: Mapping[str, list[dict[str, Any]]] | None = None,
) -> list[Path]:
    """Draw what compares runs: their curves, Figure 4 if a mixer has these gates, and Figure 7 if there are spans.

    spans: accuracy by memory span, by the run's name. metrics: the runs' logs, by the same; None reads them.
    """
    metrics = _curves(runs) if metrics is None else metrics
    files = save(metric_curves(metrics, measured_panels(metrics)), folder, "curves") if metrics else []
    if any(isinstance(module, (GateLoop, GateLoopAttention)) for run in runs for module in run.model.modules()):
        files += save(magnitude_activations(), folder, "magnitude-activations")
    if spans:
        chances = {1 / run.data.output_size for run in runs if run.name in spans}
        chance = chances.pop() if len(chances) == 1 else None
        files += save(accuracy_over_span(spans, smoothing=9, chance=chance), folder, "accuracy-by-span")
    return files


def _curves(runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    """The logs of the runs that have records: one that was converted, or killed before its first record, has none."""
    logs = {run.name: read_metrics(run.folder.metrics) for run in runs if run.folder.metrics.is_file()}
    for run in runs:
        run.task.curve(logs.get(run.name, []))
    return {name: records for name, records in logs.items() if records}


# --- gradients between segments ---


def measured_tokens(run: Run, split: Split = "test", *, segments: int = 3, warm_up: int = 4) -> Tensor:
    """Read the tokens to measure on, (1, L), from the start of a split: `segments` after `warm_up` others.

    The run is one of a Compact Recurrent Transformer over text. After the warm-up, its memory is no longer zeros.
    """
    try:
        memory_rnn(run.model)
    except ValueError as error:
        raise ValueError(f"run {run.name}: {error}") from error
    require_at_least(2, segments=segments)
    require_at_least(0, warm_up=warm_up)
    assert isinstance(run.model, CompactRecurrentTransformer)
    n_tokens = (warm_up + segments) * run.model.config.segment_length
    data: Any = run.data
    tokens = data.tokens(split)
    if len(tokens) < n_tokens:
        expected = f"at least {n_tokens} for {warm_up} + {segments} segments"
        got = f"{len(tokens)} tokens long"
        raise ValueError(sentence(f"split {split} of run {run.name}", got, expected, "lower segments or warm_up"))
    return torch.from_numpy(tokens[:n_tokens].astype("int64"))[None]


def measure_gradients(run: Run, tokens: Tensor, *, warm_up: int = 4) -> GradientFlow:
    """Measure ||dy_k/dy_i|| between the segments of what `measured_tokens` gave, and its bounds."""
    model = run.model
    assert isinstance(model, CompactRecurrentTransformer)
    border = warm_up * model.config.segment_length
    with torch.no_grad():
        state = cast(CompactRecurrentTransformerState, model.hidden(tokens[:, :border])[1]) if warm_up else None
    return measure_gradient_flow(model, tokens[:, border:], state)


def write_gradients(run: Run, options: Mapping[str, Any], flow: GradientFlow) -> Path:
    """Write RUN/gradients.json: the options, and every measured number with the positions it belongs to."""
    path = run.folder.path / "gradients.json"
    text = json.dumps({**options, **asdict(flow)}, indent=2, default=Tensor.tolist)
    with replacing(path) as file:
        file.write((text + "\n").encode())
    return path


# --- cost ---


class CostRow(NamedTuple):
    """The cost of the model of a recipe or run `name`: by the paper's formula, if it has one, and counted."""

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
        word: a recipe, FILE or FILE#VARIANT, or the folder or name of a run. A recipe precedes a run of the same name.
        overrides: values set over it.
        vocabulary: the size of the vocabulary; None takes that of the run, or of the recipe's corpus.
    """
    run = _run_of(word, overrides)
    experiment = load_recipe(word, overrides) if run is None else run.experiment
    # first: it refuses a model that cannot be counted, before its data are opened, or even generated
    n_steps = experiment.task.n_steps(experiment)
    sizes: DataSizes | VideoSizes
    if vocabulary is not None:
        require_at_least(1, vocabulary=vocabulary)
        sizes = experiment.task.sizes_of_vocabulary(experiment, vocabulary)
    elif run is not None:
        sizes = run.sizes()
    else:
        try:
            sizes = experiment.sizes(experiment.build_data())
        except (OSError, ValueError) as error:
            if not experiment.task.has_tokenizer():
                raise
            hint = "without the corpus, give the size of its vocabulary, as in --vocabulary 10000"
            raise ValueError(f"{word}: {error}\n{hint}") from error
    with on_meta():
        model: Any = experiment.model.build(sizes)
    measured = measured_cost(model, n_steps)
    return CostRow(word, model_kind(model), model.config.n_layer, n_steps, published_cost(model), measured)


def scored_perplexity(word: str, overrides: Sequence[str] = ()) -> float:
    """Read the test perplexity that `recurra eval` measured of a run, with the same overrides."""
    run = _run_of(word, overrides)
    if run is None:
        raise ValueError(sentence("run", word, "the folder of a run that was scored", "train the recipe first"))
    return float(_checked_scores(run, "perplexity")["perplexity"])


def _run_of(word: str, overrides: Sequence[str]) -> Run | None:
    """Open a run by its folder or name; None if there is none, or a recipe has this name."""
    folder = Path(word)
    if not folder.is_dir():
        with suppress(RecipeError):
            find_recipe(str(split_variant(word)[0]))
            return None
        try:
            folder = find_run(word)
        except FileNotFoundError:
            return None
    return open_run(folder, overrides=overrides)


def cost_curves(rows: Sequence[CostRow], perplexities: Sequence[float]) -> dict[str, list[CostPoint]]:
    """Group the points of perplexity over FLOPs by kind of model and, if depths differ, by depth."""
    depths = {row.n_layer for row in rows}
    curves: dict[str, list[CostPoint]] = {}
    for row, perplexity in zip(rows, perplexities):
        name = row.kind if len(depths) == 1 else f"{row.kind}, {row.n_layer} layers"
        curves.setdefault(name, []).append(CostPoint(row.segment_length, row.measured.block_flops, perplexity))
    return curves
