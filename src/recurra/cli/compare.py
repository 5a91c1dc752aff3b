"""`recurra compare`: a sweep of a recipe over mixers and seeds, or finished runs, and one table of the mixers."""

import json
import os
import statistics
import warnings
from argparse import Namespace
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from recurra._process import keep_large_blocks
from recurra.analysis.cost import MeasuredCost, measured_cost
from recurra.analysis.plots.curves import metric_curves
from recurra.analysis.plots.figure import save
from recurra.checks import require, sentence
from recurra.cli._tables import print_table
from recurra.cli.sweep import SweptRun, train_with
from recurra.mixers.base import mixer_options
from recurra.models.registry import on_meta
from recurra.train.experiment import RESUMABLE, Experiment, differences, flat, to_plain
from recurra.train.metrics import read_metrics
from recurra.train.optimizer import parameter_groups
from recurra.train.recipe import as_settings, as_words, load_recipe
from recurra.train.run import Run, default_run_folder, open_run
from recurra.train.run_folder import RunFolder


@dataclass(frozen=True)
class _MixerRow:
    """A row of the table: a mixer, what its model costs, and the scores of the seeds whose runs did not diverge."""

    mixer: str
    d_model: int
    parameters: int
    flops_per_token: float
    tokens_per_second: float | None
    state_bytes: int
    ms_per_step: float
    monitor: str
    scores: Sequence[float]
    n_runs: int

    @property
    def mean(self) -> float | None:
        """The mean score; None if all runs diverged."""
        return statistics.fmean(self.scores) if self.scores else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation of the scores (over n - 1); None for fewer than two."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else None

    def as_plain(self) -> dict[str, Any]:
        """Convert to what JSON and CSV hold."""
        return asdict(self) | {"mean": self.mean, "deviation": self.deviation}


_Group = list[tuple[Run, SweptRun]]
"""Runs that differ only in their seeds."""


def compare(arguments: Namespace) -> int:
    keep_large_blocks()
    progress = Console(stderr=True, markup=False, highlight=False)
    figure = "compare"
    if arguments.mixers:
        usual = default_run_folder(arguments.places[0])
        folder = arguments.runs or usual.with_name(f"{usual.name}-compare")
        runs = _train_all(arguments, folder, progress)
    elif arguments.runs:
        folder = arguments.runs
        runs = _finished_in(folder, progress)
    else:
        folder = Path(arguments.places[0]).resolve().parent
        runs = [_finished(place) for place in arguments.places]
        figure = "-".join([figure, *(one.folder.resolve().name for one in runs)])  # other runs have figures there
        figure = os.fsencode(figure)[:200].decode(errors="ignore")
    groups = _grouped(runs)
    _note_differences([group[0][0] for group in groups.values()], progress)
    rows = _best_first([_row(name, group) for name, group in groups.items()])
    _print(rows, arguments.style, folder.name)
    for file in _draw({row.mixer: groups[row.mixer] for row in rows}, rows[0].monitor, folder, figure):
        progress.print(str(file), soft_wrap=True)
    return 0


# --- runs: trained, or finished before ---


def _train_all(arguments: Namespace, folder: Path, progress: Console) -> list[SweptRun]:
    (recipe,), fixed, mixers = arguments.places, as_settings(arguments.overrides), arguments.mixers
    for mixer in mixers:
        mixer_options(mixer)  # names what is near an unknown one
    if not hasattr((own := load_recipe(recipe, as_words(fixed))).model, "mixer"):
        got, hint = f"{recipe}, a {own.experiment}", "train it, and compare finished runs: recurra compare RUN RUN"
        raise ValueError(sentence("recipe", got, "one whose model takes a mixer, such as ptb/gateloop", hint))
    first = load_recipe(recipe, as_words(fixed, {"model.mixer": mixers[0]}))
    data = first.build_data()
    sizes = first.sizes(data)
    settings = [{"model.mixer": mixer} for mixer in mixers]
    if arguments.equal:
        size = partial(_n_parameters, sizes=sizes)
        if arguments.equal == "flops":
            size = partial(_n_flops, sizes=sizes, length=_sequence_length(first, data))
        settings = [values | _equal_width(recipe, fixed, values, size, progress) for values in settings]
    for values in settings:
        _require_fit(recipe, fixed, values, sizes)
    n_seeds = arguments.seeds or 3
    runs: list[SweptRun] = []
    for seed in map(str, range(n_seeds)):
        for values in settings:
            progress.print(f"run {len(runs) + 1} of {n_seeds * len(mixers)}: {values['model.mixer']}, seed {seed}")
            values = {**values, "training.seed": seed}
            runs.append(train_with(recipe, folder, values, fixed, progress))
    return runs


def _require_fit(recipe: str, fixed: Mapping[str, str], values: Mapping[str, str], sizes: Any) -> None:
    """Find out before the first training whether a mixer fits the recipe."""
    experiment = load_recipe(recipe, as_words(fixed, values))
    with on_meta():
        parameter_groups(experiment.model.build(sizes), experiment.optimizer)


def _equal_width(
    recipe: str, fixed: Mapping[str, str], values: Mapping[str, str], size: Callable[[Any], int], progress: Console
) -> dict[str, str]:
    """Set the width that gives a mixer's model about the size of the recipe's own; {} for the same.

    size: of a configuration, what is to be equal.
    """
    own = load_recipe(recipe, as_words(fixed)).model
    target = size(own)

    @cache
    def size_at(width: int) -> int | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of options that a mixer lacks, for every width
                words = as_words(fixed, values, {"model.d_model": str(width)})
                return size(load_recipe(recipe, words).model)
        except (TypeError, ValueError):  # the heads do not divide it
            return None

    unit = next(unit for unit in (8, 4, 2, 1) if own.d_model >= 16 * unit or unit == 1)
    width = own.d_model
    if own.mixer != values["model.mixer"]:
        width = _closest_width(size_at, target, unit, own.d_model)
    if abs(ratio := (size_at(width) or target) / target - 1) > _EQUAL:
        apart = f"note: the closest width of mixer {values['model.mixer']}, {width}"
        progress.print(f"{apart}, is {ratio:+.0%} away", soft_wrap=True)
    return {} if width == own.d_model else {"model.d_model": str(width)}


_EQUAL = 0.05
"""How far sizes that are to be equal may be apart before a note says so."""


def _closest_width(size: Callable[[int], int | None], target: int, unit: int, start: int) -> int:
    """Find the multiple of `unit` whose size, which grows with the width, is closest to `target`.

    size: of a width; None where no model can be made. start: a width from which on to look. Of two that are
    equally close, the narrower one is taken.
    """

    @cache
    def from_on(n: int) -> tuple[int, int]:
        for width in range(n * unit, (n + _MOST_REFUSED) * unit, unit):
            if (number := size(width)) is not None:
                return width, number
        raise ValueError(sentence("model.d_model", f"{n * unit} and above, refused", "a width that the mixer allows"))

    high = start // unit
    while from_on(high)[1] < target:
        high *= 2
    least = bisect_left(range(1, high), True, key=lambda n: from_on(n)[1] >= target) + 1
    near = [from_on(least)]
    below = ((n * unit, size(n * unit)) for n in range(least - 1, 0, -1))
    near += islice(((width, number) for width, number in below if number is not None), 1)
    return min(near, key=lambda one: (abs(one[1] - target), one[0]))[0]


_MOST_REFUSED = 128
"""Widths in a row that a mixer may refuse."""


def _n_parameters(config: Any, sizes: Any) -> int:
    with on_meta():
        return sum(parameter.numel() for parameter in config.build(sizes).parameters())


def _n_flops(config: Any, sizes: Any, length: int) -> int:
    """Count those of a forward pass."""
    cost = _cost(config, sizes, length)
    return cost.block_flops + cost.vocabulary_flops


def _cost(config: Any, sizes: Any, length: int) -> MeasuredCost:
    with on_meta():
        model = config.build(sizes)
    return measured_cost(model, length)


def _finished_in(folder: Path, progress: Console) -> list[SweptRun]:
    runs = []
    for file in sorted(folder.glob("*/config.yaml")):
        try:
            runs.append(_finished(file.parent))
        except ValueError as error:  # one that diverged, or still trains
            progress.print(f"note: left out: {error}", soft_wrap=True)
    require(len(runs) > 0, "--runs", str(folder), "a folder with the folders of finished runs")
    return runs


def _finished(place: str | Path) -> SweptRun:
    folder = RunFolder(place)
    folder.require_run()
    summary = folder.read_summary() if folder.summary.is_file() else {}
    best = summary.get("finished") and summary["validation"].get("best")
    if not best:
        hint = f"train it to its end with `recurra train --resume {folder.quoted}`, or leave it out"
        got = f"{folder.path}, which is not finished, has diverged or was not validated"
        raise ValueError(sentence("run", got, "a finished run", hint))
    return SweptRun(folder.path, {}, best)


_HOUSEKEEPING = (RESUMABLE | {"training.seed"}) - {
    *("data.path", "training.epochs", "training.max_steps", "training.patience", "training.stop_at")
}
"""Settings that do not make a comparison unfair."""


def _grouped(runs: Sequence[SweptRun]) -> dict[str, _Group]:
    """Put runs together that differ only in their seeds, by the name of the mixer, or of a folder if that repeats."""
    groups: dict[str, _Group] = {}
    for one in runs:
        run = open_run(one.folder)
        require(run.task.unit == "tokens", f"run {one.folder}", run.experiment.experiment, "one that reads tokens")
        settings = {key: value for key, value in flat(to_plain(run.experiment)) if key not in _HOUSEKEEPING}
        groups.setdefault(json.dumps(settings, sort_keys=True), []).append((run, one))
    firsts = [group[0][0] for group in groups.values()]
    mixers = [_mixer_of(run) for run in firsts]
    names = [run.name if mixers.count(mixer) > 1 else mixer for run, mixer in zip(firsts, mixers)]
    is_clear = len(set(names)) == len(names)
    require(is_clear, "runs", f"several with the names {', '.join(names)}", "folders with different names")
    for group in groups.values():
        seeds = [run.experiment.training.seed for run, _ in group]
        differ = len(set(seeds)) == len(seeds)
        folders = ", ".join(str(one.folder) for _, one in group)
        require(differ, f"training.seed of {folders}", seeds, "a different seed for each run with the same settings")
    return dict(zip(names, groups.values()))


def _mixer_of(run: Run) -> str:
    mixer = getattr(run.experiment.model, "mixer", run.experiment.experiment)
    return mixer if isinstance(mixer, str) else "+".join(dict.fromkeys(mixer))


def _note_differences(runs: Sequence[Run], progress: Console) -> None:
    """Refuse to compare scores of different kinds, and say in what more than their models runs differ."""
    first, found = runs[0], set()
    for run in runs[1:]:
        for what, other, expected in (
            ("task", type(run.task).__name__, type(first.task).__name__),
            ("training.monitor", run.experiment.training.monitor, first.experiment.training.monitor),
        ):
            require(other == expected, f"{what} of {run.folder.path}", other, f"{expected}, as in {first.folder.path}")
        if first.task.has_tokenizer() and run.tokenizer.fingerprint != first.tokenizer.fingerprint:
            what, expected = f"the vocabulary of {run.folder.path}", f"that of {first.folder.path}"
            raise ValueError(sentence(what, "different", expected, "their scores cannot be compared"))
        found |= differences(to_plain(first.experiment), to_plain(run.experiment)).keys() - _HOUSEKEEPING
    if unfair := sorted(key for key in found if key != "experiment" and not key.startswith("model.")):
        progress.print(f"note: the runs differ in more than their models: {', '.join(unfair)}", soft_wrap=True)


# --- numbers ---


def _row(name: str, group: _Group) -> _MixerRow:
    run = group[0][0]
    sizes, monitor = run.sizes(), run.experiment.training.monitor
    length = _sequence_length(run.experiment, run.data)
    cost = _cost(run.experiment.model, sizes, length)
    over = [(other, one.scores[monitor]) for other, one in group if one.scores]
    speeds = [other.folder.read_summary()["tokens_per_second"] for other, _ in over]
    return _MixerRow(
        mixer=name,
        d_model=run.experiment.model.d_model,
        parameters=cost.parameters,
        flops_per_token=(cost.block_flops + cost.vocabulary_flops) / length,
        tokens_per_second=statistics.fmean(filter(None, speeds)) if any(speeds) else None,
        state_bytes=cost.state_bytes,
        ms_per_step=_ms_per_step(run.experiment.model.build(sizes).eval()),
        monitor=monitor,
        scores=[score for _, score in over],
        n_runs=len(group),
    )


def _sequence_length(experiment: Experiment, data: Any) -> int:
    try:
        return experiment.task.n_steps(experiment)
    except ValueError:  # a generated task
        return int(data.source("train").batch(0, 0).inputs.shape[1])


_WARM_UP, _MEASURED = 10, 100
"""Steps."""


def _ms_per_step(model: nn.Module) -> float:
    """Measure the median time of a step of one token on the CPU, batch 1; it does not depend on the weights."""
    token, state, times = torch.zeros(1, 1, dtype=torch.int64), None, []
    with torch.inference_mode():
        for _ in range(_WARM_UP + _MEASURED):
            start = perf_counter()
            _, state = model(token, state)
            times.append(perf_counter() - start)
    return 1000 * statistics.median(times[_WARM_UP:])


# --- the table and the figure ---


def _best_first(rows: Sequence[_MixerRow]) -> list[_MixerRow]:
    """Sort by the mean score; mixers whose runs all diverged come last."""

    def rank(row: _MixerRow) -> tuple[bool, float]:
        mean = row.mean or 0.0
        return not row.scores, mean if row.monitor == "loss" else -mean

    return sorted(rows, key=rank)


def _print(rows: Sequence[_MixerRow], style: str | None, title: str) -> None:
    print_table(style, [row.as_plain() for row in rows], _as_table(rows, title), _NARROWEST)


_NARROWEST = 74
"""Width of a table that still has room for names; a narrower terminal wraps its lines."""


def _cells(row: _MixerRow) -> list[str]:
    speed = "-" if row.tokens_per_second is None else _short(row.tokens_per_second)
    runs = str(row.n_runs) if len(row.scores) == row.n_runs else f"{len(row.scores)}/{row.n_runs}"
    spread = "" if row.deviation is None else f" ± {row.deviation:.4f}"
    score = "diverged" if row.mean is None else f"{row.mean:.4f}{spread}"
    numbers = [_short(row.parameters), _short(row.flops_per_token), speed, _short(row.state_bytes)]
    return [row.mixer, *numbers, f"{row.ms_per_step:.2f}", runs, score]


def _short(number: float) -> str:
    """Write three digits: 950, 1.23k, 45.6M."""
    unit, units = "", iter("kMGT")
    while float(f"{number:.3g}") >= 1000:
        number, unit = number / 1000, next(units)
    return f"{number:#.3g}".rstrip(".") + unit if unit else f"{number:.0f}"


def _as_table(rows: Sequence[_MixerRow], title: str) -> Table:
    caption = "runs: finished/all; the others diverged" if any(len(row.scores) < row.n_runs for row in rows) else None
    table = Table(
        title=title, caption=caption, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    headings = ["mixer", "params", "FLOPs/token", "tokens/s", "state bytes", "ms/step", "runs"]
    headings.append(f"validation {rows[0].monitor}")
    first, *others = (heading.replace("/", "/\n").replace(" ", "\n") for heading in headings)
    table.add_column(first, overflow="fold")
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _draw(groups: Mapping[str, _Group], monitor: str, folder: Path, name: str) -> list[Path]:
    """Draw FOLDER/NAME: the validation score of each mixer over the steps, as the mean of its runs."""
    column = f"valid_{monitor}"
    logs = {
        name: [read_metrics(run.folder.metrics) for run, one in group if one.scores] for name, group in groups.items()
    }
    curves = {name: curve for name, of_runs in logs.items() if (curve := _mean_curve(of_runs, column))}
    if not curves:
        return []
    return save(metric_curves(curves, {f"validation {monitor}": [column]}), folder, name)


def _mean_curve(logs: Sequence[Sequence[Mapping[str, Any]]], column: str) -> list[dict[str, float]]:
    """Average a column of several logs at the steps at which all of them have it."""
    curves = [{record["step"]: record[column] for record in log if record.get(column) is not None} for log in logs]
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    return [{"step": step, column: statistics.fmean(curve[step] for curve in curves)} for step in steps]
