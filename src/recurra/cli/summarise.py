"""From a run's folder to its summary; what needs the weights is measured here."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from recurra.analysis import record_gates
from recurra.cli.cost import as_plain, model_cost
from recurra.cli.figures import score_by_span
from recurra.cli.training_command import training_command
from recurra.cli.video_scores import DETAILS
from recurra.data import MemoryHorizon
from recurra.report import Summary, thinned_curve
from recurra.runs import Run, open_run
from recurra.training import CheckpointFolder, Experiment, RunFolder, TextExperiment, read_metrics
from recurra.training.experiment import to_plain

GATE_DECIMALS = 3
"""Of magnitudes in [0, 1] that are drawn: a thousandth is less than a line is wide."""


def summarise(path: str, recipes: Path, overrides: Sequence[str] = ()) -> Summary:
    """The summary of a run as it stands, finished or not.

    Args:
        path: the run's folder.
        recipes: the folder of recipes; the run's command names the one that it comes from.
        overrides: where a corpus has moved to; nothing else.

    Raises:
        FileNotFoundError: there is no run.
        CheckpointError: it has no checkpoint yet that could be measured, or a damaged one.
        ValueError: `overrides` make another model or other data of it, or its scores are of another checkpoint.
    """
    run = open_run(path, overrides=overrides)
    if run.changes:
        raise ValueError(f"a summary is of the run as it was trained; these would change it: {', '.join(run.changes)}")
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    rows = read_metrics(run.folder.metrics)
    saved = _newest_checkpoint(run.folder)
    steps_per_epoch, total_steps = run.experiment.training.n_steps(len(run.data.source("train")))
    reached = _reached(rows, saved["position"], run.experiment)
    return Summary(
        name=run.name,
        command=training_command(run.name, run.experiment, recipes),
        config=without_outer_places(to_plain(run.experiment)),
        parameters=parameters,
        finished=reached["step"] >= total_steps,
        steps=reached["step"],
        total_steps=total_steps,
        epochs=reached["step"] / steps_per_epoch,
        total_epochs=total_steps / steps_per_epoch,
        unit=run.experiment.unit,
        count=reached["tokens"],
        seconds=reached["seconds"],
        # Older checkpoints do not know.
        resumed_at=list(saved.get("resumed_at", ())),
        versions=saved["versions"],
        hardware=_hardware(run.folder),
        validation=_validation(rows, run.experiment),
        scores=_scores(run),
        curve=thinned_curve(rows),
        cost=_cost(run),
        **_of_memory_horizon(run),
    )


def without_outer_places(config: Any) -> Any:
    """A configuration with the bare name in place of each path that leads out of the working folder: where things lie
    on a machine is nobody else's business."""
    if isinstance(config, Mapping):
        return {key: without_outer_places(value) for key, value in config.items()}
    if isinstance(config, list):
        return [without_outer_places(value) for value in config]
    if isinstance(config, str) and (PurePath(config).is_absolute() or config.startswith(("..", "~"))):
        return PurePath(config).name
    return config


def _newest_checkpoint(folder: RunFolder) -> dict[str, Any]:
    checkpoints = CheckpointFolder(folder.checkpoints)
    return checkpoints.load("last" if checkpoints.steps() else "best")[1]


def _reached(rows: Sequence[Mapping[str, str]], position: Mapping[str, Any], experiment: Experiment) -> dict[str, Any]:
    """How far the run is: the log's last row or the newest checkpoint, whichever is later."""
    last = rows[-1] if rows else None
    if last is None or int(last["step"]) < position["step"]:
        return {key: position[key] for key in ("step", "tokens", "seconds")}
    return {"step": int(last["step"]), "tokens": int(last[experiment.unit]), "seconds": float(last["seconds"])}


def _hardware(folder: RunFolder) -> dict[str, Any] | None:
    """From summary.json, which older runs have at their end only."""
    if not folder.summary.is_file():
        return None
    found: dict[str, Any] = json.loads(folder.summary.read_text(encoding="utf-8"))["hardware"]
    return found


def _validation(rows: Sequence[Mapping[str, str]], experiment: Experiment) -> dict[str, dict[str, int | float]]:
    """The last evaluation and the best one, of equal ones the first, as the trainer has them."""
    scores = []
    for row in rows:
        if row["valid_loss"]:
            score: dict[str, int | float] = {"step": int(row["step"]), "loss": float(row["valid_loss"])}
            scores.append(score | ({"accuracy": float(row["valid_accuracy"])} if row["valid_accuracy"] else {}))
    if not scores:
        return {}
    by_accuracy = experiment.training.monitor == "accuracy"
    best = max(scores, key=lambda score: score["accuracy"] if by_accuracy else -score["loss"])
    return {"best": best, "last": scores[-1]}


def _scores(run: Run) -> dict[str, dict[str, Any]]:
    """What `recurra eval` left of the test split."""
    scores = {}
    for file in sorted(run.folder.path.glob("eval-test*.json")):
        try:
            found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            checkpoint, step = found["checkpoint"], found["step"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file} is not what `recurra eval` writes ({error!r}); score the run again, or remove the file"
            ) from error
        if checkpoint == "best" and step != run.step:
            raise ValueError(
                f"{file} is of step {step}, and the best checkpoint is now of step {run.step}; score it again "
                f"with `recurra eval {run.folder.path}`, or remove the file"
            )
        scores[file.stem] = {key: value for key, value in found.items() if key not in DETAILS}
    return scores


def _cost(run: Run) -> dict[str, Any] | None:
    return (
        as_plain(model_cost(run.name, run.experiment, run.model))
        if isinstance(run.experiment, TextExperiment)
        else None
    )


def _of_memory_horizon(run: Run) -> dict[str, Any]:
    """Right positions by memory span, and the gates, where they depend on the data."""
    if not isinstance(run.data, MemoryHorizon):
        return {}
    spans = score_by_span(run)[1]
    return {
        "spans": {"n_correct": spans.n_correct.tolist(), "counts": spans.counts.tolist()},
        "gates": _gates(run, run.data.reset_token),
    }


def _gates(run: Run, reset_token: int) -> dict[str, Any] | None:
    if not any(hasattr(module, "transition") for module in run.model.modules()):
        return None
    record = record_gates(run.model, run.data.source("test").batch(0, 0).inputs[:1])
    means = [magnitude[0].mean(dim=1) for magnitude in record.magnitudes]
    if all(bool((mean == mean[0]).all()) for mean in means):
        return None
    resets = record.at_token(reset_token)[0].nonzero().flatten().tolist()
    rounded = [[round(value, GATE_DECIMALS) for value in mean.tolist()] for mean in means]
    return {"layers": list(record.layers), "resets": resets, "means": rounded}
