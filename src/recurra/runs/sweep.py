"""Sweeps: a recipe trained with many values, each run a folder, compared by validation."""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from recurra.checks import require, sentence
from recurra.files.locking import locked
from recurra.runs.start import resume_run, start_run
from recurra.training import CheckpointFolder, Experiment, RunFolder, Trainer, load_recipe
from recurra.training.experiment import differences, require_resumable, to_plain

_LENGTH = ("averaging.start_step", "training.epochs", "training.max_steps", "training.patience", "training.stop_at")
"""How long a run lasts, and which part of it is averaged."""


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, uniformly or in the logarithm; whole if both ends are."""

    low: float
    high: float
    logarithmic: bool = False
    whole: bool = False


_STOPPED = "stopped"
"""What a trial says that a signal ended."""
_MOST_KILLS = 3
"""Values whose run ended so often with its process, as for want of memory, are not tried again."""

Space = Mapping[str, "list[str] | Range"]
"""What to try: values, or a range, by the dotted keys of the recipe."""


_RANGE = re.compile(r"log:|[^,/]+\.\.[^,/]+$")
"""What is meant as a range; ../a,../b are folders."""


def parse_space(words: Mapping[str, str]) -> dict[str, list[str] | Range]:
    """Read "0.001,0.003" as values, and "1e-4..1e-2" or "log:1e-4..1e-2" as ranges.

    Raises:
        ValueError: a range is not two rising numbers.
    """
    space: dict[str, list[str] | Range] = {}
    for key, text in words.items():
        if not _RANGE.match(text):
            space[key] = text.split(",")
            continue
        logarithmic, ends = text.startswith("log:"), text.removeprefix("log:").split("..")
        try:
            low, high = map(float, ends)
        except ValueError:
            raise ValueError(sentence(key, repr(text), "LOW..HIGH or log:LOW..HIGH")) from None
        require(low < high and (low > 0 or not logarithmic), key, text, "a range that rises, above 0 if it is log:")
        whole = all(end.lstrip("-").isdecimal() for end in ends)
        space[key] = Range(low, high, logarithmic, whole)
    return space


def grid(space: Space) -> Iterator[dict[str, str]]:
    """Yield every combination of values. Raises ValueError for a range."""
    for key, values in space.items():
        require(isinstance(values, list), key, values, "values with commas between them", "a range needs --trials")
    lists = [values for values in space.values() if isinstance(values, list)]
    for combination in itertools.product(*lists):
        yield dict(zip(space, combination))


@dataclass(frozen=True)
class Tried:
    """A run of a sweep. values: what was set. scores: of its best evaluation; empty if it failed. error: why."""

    folder: Path
    values: dict[str, str]
    scores: dict[str, int | float]
    error: str = ""


def try_values(recipe: str, out: Path, values: Mapping[str, str], overrides: Sequence[str]) -> Tried:
    """Train a recipe with some values, or continue or read the run that has them.

    A run that diverges is a result, not an error.

    Raises:
        BlockingIOError: another process trains the run.
        ValueError: the folder of these values has a run of other settings.
    """
    folder = _folder(out, values)
    words = [*overrides, *(f"--{key}={value}" for key, value in values.items())]
    try:
        trainer = _trainer(recipe, folder, words)
        if not trainer.finished and (received := trainer.fit().received) is not None:
            raise KeyboardInterrupt(received.name)
    except FloatingPointError as error:
        return Tried(folder.path, dict(values), {}, str(error))
    return Tried(folder.path, dict(values), trainer.scores.get("best", {}))


def _folder(out: Path, values: Mapping[str, str]) -> RunFolder:
    name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items()).replace("/", "-")
    return RunFolder(out / (name or "recipe"))


def _trainer(recipe: str, folder: RunFolder, words: Sequence[str]) -> Trainer:
    checkpoints = CheckpointFolder(folder.checkpoints)
    if folder.config.exists() and (checkpoints.steps() or checkpoints.best.exists()):
        own, asked = load_recipe(folder.config), load_recipe(recipe, words)
        _require_same(folder, own, asked)
        return resume_run(folder.path, overrides=[*_length(own, asked), *words])
    if folder.config.exists():  # ended before its first checkpoint, or trained by another process, which has its lock
        folder.lock()
        try:
            folder.config.unlink()
            folder.tokenizer.unlink(missing_ok=True)  # of settings that may be others now
        finally:
            folder.unlock()
    return start_run(recipe, folder.path, words)


def _length(own: Experiment, asked: Experiment) -> list[str]:
    """Write the recipe's length as words where it is not the run's, so that all runs of a sweep end alike."""
    changes = differences(to_plain(own), to_plain(asked))
    return [f"--{key}={json.dumps(changes[key][1])}" for key in _LENGTH if key in changes]


def _require_same(folder: RunFolder, own: Experiment, asked: Experiment) -> None:
    """Refuse to take a run of other settings for one of this sweep: folders are named by what a sweep varies."""
    if asked.training.precision == "auto":
        asked = replace(asked, training=replace(asked.training, precision=own.training.precision))
    try:
        require_resumable(to_plain(own), asked)
        _require_same_data(to_plain(own)["data"], to_plain(asked)["data"])
    except ValueError as error:
        raise ValueError(f"{folder.path}: {error}; or choose another folder with --out") from error


def _require_same_data(own: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse other data: a run is resumed with data elsewhere if they have moved, and no longer are where they were."""
    for key in ("path", "poses"):
        before, now = own.get(key), asked.get(key)
        if before is None or now is None or _place(before) == _place(now):
            continue
        has_moved = own.get("source") != "hf" and not _place(before).exists()
        require(has_moved, f"data.{key}", now, f"{before!r}, with which this run was trained")


def _place(word: str) -> Path:
    return Path(word).expanduser().resolve()


def search(
    space: Space,
    out: Path,
    attempt: Callable[[dict[str, str]], Tried],
    n_trials: int,
    measure: Literal["loss", "accuracy"],
) -> list[Tried]:
    """Let Optuna choose the values of `n_trials` runs; its study lies in the folder, so that a sweep can continue.

    A run that was stopped or killed is continued first. One that diverged is not tried again. One that ended with an
    error does not count.

    Args:
        space: values and ranges.
        out: the folder of the sweep.
        attempt: trains with some values.
        n_trials: runs in all, those of an earlier call included.
        measure: what to optimise.

    Raises:
        BlockingIOError: another process does this.
        OSError: the file of the study cannot be opened.
        ValueError: it is damaged, or a key has other values than in earlier trials.
    """
    import optuna
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.ERROR)  # it warns of each interrupt and error with a traceback
    tried: list[Tried] = []

    def objective(trial: Any) -> float:
        values = {key: str(_suggested(trial, key, where)) for key, where in space.items()}
        try:
            tried.append(attempt(values))
        except KeyboardInterrupt:  # to Optuna an error like others
            trial.set_user_attr(_STOPPED, True)
            raise
        if not tried[-1].scores:
            trial.set_user_attr("error", tried[-1].error)
            raise optuna.TrialPruned(tried[-1].error)
        return float(tried[-1].scores[measure])

    out.mkdir(parents=True, exist_ok=True)
    with locked(out / ".sweep.lock", partial(_refuse, out)):
        study = _study(space, out, measure)
        for trial in study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED)):
            values, diverged = _words(trial.params), trial.state == TrialState.PRUNED
            error = trial.user_attrs.get("error", "")
            tried.append(Tried(_folder(out, values).path, values, {}, error) if diverged else attempt(values))
        study.optimize(objective, n_trials=max(0, n_trials - len(tried)))
    return tried


def _refuse(out: Path) -> None:
    raise BlockingIOError(sentence(f"the sweep in {out}", "under way in another process", "one at a time"))


def _study(space: Space, out: Path, measure: Literal["loss", "accuracy"]) -> Any:
    """Open the study of a sweep, or begin it."""
    import optuna
    from sqlalchemy.exc import DatabaseError, OperationalError

    file = out / "study.db"
    try:
        study = optuna.create_study(
            study_name="sweep",
            storage=f"sqlite:///{file}",
            load_if_exists=True,
            direction="minimize" if measure == "loss" else "maximize",
        )
        before = study.trials
    except (DatabaseError, optuna.exceptions.StorageInternalError) as error:
        reason = error if isinstance(error, DatabaseError) else error.__cause__  # of an error of Optuna's own
        if isinstance(reason, OperationalError):  # a locked file or a full disk is no damage
            raise OSError(f"{file} cannot be opened: {reason.orig}") from error
        came, expected = f"{file}, which is damaged", "one that recurra sweep wrote"
        mend = "remove it (the runs remain), or choose another folder with --out"
        raise ValueError(sentence("the study", came, expected, mend)) from error
    _require_same_space(space, before, out)
    _queue_interrupted(study, out)
    # one seed for all calls would try its first values again
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    return study


def _require_same_space(space: Space, trials: Sequence[Any], out: Path) -> None:
    """Refuse a key with other values than in earlier trials, or a range of another kind: Optuna cannot join them."""
    earlier = {key: distribution for trial in trials for key, distribution in trial.distributions.items()}
    for key, where in space.items():
        before = _where(earlier[key]) if key in earlier else where
        expected = f"{_as_word(before)!r}, as in the earlier trials in {out}"
        mend = "give those again, or choose another folder with --out"
        require(_fixed(where) == _fixed(before), key, _as_word(where), expected, mend)


def _where(distribution: Any) -> "list[str] | Range":
    """What was given to try, from what Optuna keeps of it."""
    if hasattr(distribution, "choices"):
        return list(distribution.choices)
    low, high = distribution.low, distribution.high
    return Range(float(low), float(high), distribution.log, whole=isinstance(low, int))


def _fixed(where: "list[str] | Range") -> object:
    """What has to stay as it is: all values, but not the ends of a range."""
    return where if isinstance(where, list) else (where.logarithmic, where.whole)


def _as_word(where: "list[str] | Range") -> str:
    """Write values or a range as `parse_space` reads them."""
    if isinstance(where, list):
        return ",".join(where)
    low, high = (int(end) if where.whole else end for end in (where.low, where.high))
    return f"{'log:' if where.logarithmic else ''}{low}..{high}"


def _queue_interrupted(study: Any, out: Path) -> None:
    """Queue the values of runs that were stopped, or whose process was killed, but not for ever."""
    from optuna.trial import TrialState

    last = {_folder(out, _words(trial.params)).path: trial for trial in study.trials}
    waiting = [trial.system_attrs.get("fixed_params") for trial in study.get_trials(states=(TrialState.WAITING,))]
    for trial in last.values():
        stopped = trial.state == TrialState.FAIL and trial.user_attrs.get(_STOPPED)
        if trial.state == TrialState.RUNNING:  # though no process is there: `search` has the lock
            study.tell(trial.number, state=TrialState.FAIL)
            kills = [one for one in study.trials if one.params == trial.params and not one.user_attrs.get(_STOPPED)]
            if len(kills) >= _MOST_KILLS:
                continue
        elif not stopped:
            continue
        if trial.params not in waiting:
            study.enqueue_trial(trial.params)


def _words(params: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in params.items()}


def _suggested(trial: Any, key: str, where: "list[str] | Range") -> Any:
    if isinstance(where, list):
        return trial.suggest_categorical(key, where)
    if where.whole:
        return trial.suggest_int(key, int(where.low), int(where.high), log=where.logarithmic)
    return trial.suggest_float(key, where.low, where.high, log=where.logarithmic)
