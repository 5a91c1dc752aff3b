"""From a run's folder to its summary. Whatever needs the weights is measured here."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from recurra.checks import sentence
from recurra.models.outline import outlined
from recurra.runs.cost import model_cost
from recurra.runs.figures import gates_of
from recurra.runs.places import without_outer_places
from recurra.runs.run import Run, open_run
from recurra.runs.score_files import AGAIN, PREFIX, read_scores, staleness
from recurra.runs.scores import DETAILS, score_by_span
from recurra.runs.summary import Summary, thinned_curve
from recurra.runs.training_command import training_command
from recurra.training import CheckpointFolder, Experiment, RunFolder, read_metrics
from recurra.training.experiment import to_plain

GATE_DECIMALS = 3
"""Decimals of drawn magnitudes in [0, 1]: a thousandth is less than the width of a line."""


def summarise(path: str | Path, recipes: Path, overrides: Sequence[str] = ()) -> Summary:
    """Summarise a run as it stands, finished or not.

    A finished run over text may have left its checkpoints elsewhere: nothing in its summary needs the weights.

    Args:
        path: the run's folder.
        recipes: the folder of recipes; the run's command names the one that it was trained with.
        overrides: where a corpus has moved to, and nothing else.

    Raises:
        FileNotFoundError: the folder does not contain a run.
        CheckpointError: the run has no checkpoint, though it is unfinished or not over text, or a damaged one.
        ValueError: `overrides` change the model or its data, or the run's scores are of another checkpoint.
    """
    run = open_run(path, overrides=overrides)
    if _left_its_weights(run):
        run = _Weightless(run.folder, run.experiment, overrides=overrides)
    if run.changes:
        came = f"a change of {', '.join(run.changes)}"
        raise ValueError(sentence("overrides", came, "paths alone", "a summary is of the run as it was trained"))
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    rows = read_metrics(run.folder.metrics)
    saved = run.saved if isinstance(run, _Weightless) else _newest_checkpoint(run.folder)
    steps_per_epoch, total_steps = run.experiment.training.n_steps(len(run.data.source("train")))
    reached = _reached(rows, saved["position"], run.experiment)
    return Summary(
        name=run.name,
        command=training_command(run.name, run.experiment, recipes),
        config=without_outer_places(to_plain(run.experiment)),
        parameters=parameters,
        finished=reached["step"] >= total_steps or _ended_early(run, reached["step"]),
        steps=reached["step"],
        total_steps=total_steps,
        epochs=reached["step"] / steps_per_epoch,
        total_epochs=total_steps / steps_per_epoch,
        unit=run.task.unit,
        count=reached["tokens"],
        seconds=reached["seconds"],
        # Older checkpoints did not store it.
        resumed_at=list(saved.get("resumed_at", ())),
        versions=saved["versions"],
        hardware=_hardware(run.folder),
        validation=_validation(rows, run.experiment),
        scores=_scores(run),
        curve=thinned_curve(rows),
        cost=_cost(run),
        **_of_memory_horizon(run),
    )


def _left_its_weights(run: Run) -> bool:
    """Whether a run over text is finished, and has no checkpoint in its folder."""
    if not run.task.has_tokenizer() or not run.folder.summary.is_file():
        return False
    return not any(run.folder.checkpoints.glob("*")) and bool(run.folder.read_summary()["finished"])


class _Weightless(Run):
    """A finished run without weights. Its model is an outline, and what a checkpoint would say is in summary.json."""

    @cached_property
    def saved(self) -> dict[str, Any]:
        told = self.folder.read_summary()
        position = {"step": told["steps"], "tokens": told["tokens"], "seconds": told["seconds"]}
        return {"position": position, "versions": told["versions"], "resumed_at": told["resumed_at"]}

    @cached_property
    def _loaded(self) -> tuple[nn.Module, int]:
        with outlined():
            model = self.experiment.model.build(self.sizes())
        told = self.folder.read_summary()
        return model.eval(), told["validation"].get("best", {}).get("step", told["steps"])


def _newest_checkpoint(folder: RunFolder) -> dict[str, Any]:
    checkpoints = CheckpointFolder(folder.checkpoints)
    return checkpoints.load("last" if checkpoints.steps() else "best")[1]


def _reached(rows: Sequence[Mapping[str, Any]], position: Mapping[str, Any], experiment: Experiment) -> dict[str, Any]:
    """How far the run has got: by the log's last row or the newest checkpoint, whichever is later."""
    last = rows[-1] if rows else None
    if last is None or int(last["step"]) < position["step"]:
        return {key: position[key] for key in ("step", "tokens", "seconds")}
    return {"step": int(last["step"]), "tokens": int(last[experiment.task.unit]), "seconds": float(last["seconds"])}


def _hardware(folder: RunFolder) -> dict[str, Any] | None:
    """Read it from summary.json, which older runs write only at their end."""
    if not folder.summary.is_file():
        return None
    found: dict[str, Any] | None = folder.read_summary().get("hardware")
    return found


def _ended_early(run: Run, step: int) -> bool:
    """Whether `training.patience` or `training.stop_at` has ended the run at this step, as its trainer says."""
    training = run.experiment.training
    if (training.patience is None and training.stop_at is None) or not run.folder.summary.is_file():
        return False
    summary = run.folder.read_summary()
    return bool(summary["finished"]) and summary["steps"] == step


def _validation(rows: Sequence[Mapping[str, Any]], experiment: Experiment) -> dict[str, dict[str, int | float]]:
    """The last evaluation and the best one, chosen as in the trainer: of equal accuracies the surest."""
    scores = []
    for row in rows:
        if row["valid_loss"] is not None:
            score: dict[str, int | float] = {"step": int(row["step"]), "loss": float(row["valid_loss"])}
            if row["valid_accuracy"] is not None:
                score["accuracy"] = float(row["valid_accuracy"])
            scores.append(score)
    if not scores:
        return {}
    by_accuracy = experiment.training.monitor == "accuracy"
    best = max(scores, key=lambda score: (score["accuracy"] if by_accuracy else 0.0, -score["loss"]))
    return {"best": best, "last": scores[-1]}


def _scores(run: Run) -> dict[str, dict[str, Any]]:
    """The scores of the test split that `recurra eval` wrote."""
    scores = {}
    for name, found in read_scores(run.folder).items():
        if not name.startswith("test"):
            continue
        file = run.folder.path / f"{PREFIX}{name}.json"
        if "checkpoint" not in found or "step" not in found:
            came = f"{file}, which has no checkpoint or no step"
            raise ValueError(sentence("scores", came, "a file of `recurra eval`", AGAIN))
        if found["checkpoint"] == "best" and found["step"] != run.step:
            came = f"{file} of step {found['step']}"
            raise ValueError(sentence("scores", came, f"those of the best checkpoint, of step {run.step}", AGAIN))
        if stale := staleness(run.folder, found):
            raise ValueError(f"{file} was {stale}: {AGAIN}")
        scores[file.stem] = {key: value for key, value in found.items() if key not in DETAILS}
    return scores


def _cost(run: Run) -> dict[str, Any] | None:
    if not run.task.has_tokenizer():
        return None
    return model_cost(run.name, run.experiment, run.model).as_plain()


def _of_memory_horizon(run: Run) -> dict[str, Any]:
    """Correct positions by memory span, and the gates if they depend on the data."""
    if not run.task.has_spans:
        return {}
    spans = score_by_span(run)[1]
    return {
        "spans": {"n_correct": spans.n_correct.tolist(), "counts": spans.counts.tolist()},
        "gates": _gates(run, run.task.reset_token(run)),
    }


def _gates(run: Run, reset_token: int | None) -> dict[str, Any] | None:
    record = gates_of(run)
    if record is None:
        return None
    means = [magnitude[0].mean(dim=1) for magnitude in record.magnitudes]
    if all(bool((mean == mean[0]).all()) for mean in means):
        return None
    assert reset_token is not None
    resets = record.at_token(reset_token)[0].nonzero().flatten().tolist()
    rounded = [[round(value, GATE_DECIMALS) for value in mean.tolist()] for mean in means]
    return {"layers": list(record.layers), "resets": resets, "means": rounded}
