"""Tables of the page of results: each function returns Markdown."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from recurra.checks import sentence
from recurra.runs.summary import Summary
from recurra.training import RecipeFamily
from recurra.training.experiment import flat
from tools.pages.markdown import NOTHING, show, table

TEST_LENGTHS = ("data.eval_min_length", "data.eval_max_length")
IDENTITY = ("model.n_layer", "model.d_model")
"""What a run shares with its variant of a family, beside the keys in which the variants differ."""


def epochs(run: Summary) -> str:
    """Show the number of epochs of a run; of an unfinished one, how many it has so far."""
    if run.finished:
        return f"{run.epochs:g}"
    return f"{run.epochs:.3g} of {run.total_epochs:g}, **unfinished**"


def horizon_table(runs: Sequence[Summary], published: Mapping[str, float] = {}) -> str:
    """Tabulate runs on Memory Horizon with their accuracies.

    published: test accuracies by the run's name; they get a column if there are any.

    Raises:
        ValueError: there are no runs, or one is not on Memory Horizon.
    """
    require_runs(runs)
    rows = []
    for run in runs:
        if run.config["experiment"] != "memory-horizon":
            came = f"{run.name}, a run of {run.config['experiment']}"
            raise ValueError(sentence("run", came, "one on Memory Horizon"))
        rows.append(
            [
                run.name,
                mixer(run),
                epochs(run),
                show(run.validation.get("best", {}).get("accuracy"), 3),
                show(run.score("accuracy"), 3),
                *([show(published.get(run.name), 2)] if published else []),
                show(run.seconds / 60),
                run.precision,
                str(run.seed),
            ]
        )
    column = ["published test"] if published else []
    return table(["run", "mixer", "epochs", "valid", "test", *column, "minutes", "precision", "seed"], rows)


def measured_on(runs: Sequence[Summary]) -> str:
    """Name the versions and the machines that runs were trained with, in a sentence."""
    require_runs(runs)
    found = []
    for run in runs:
        software = ", ".join(f"{name} {version}" for name, version in run.versions.items())
        machine = run.hardware or {}
        words = [
            f"{machine['processor']}, {machine['threads']} of {machine['cores']} cores" if machine else "",
            machine.get("gpu") or "",
        ]
        found.append(" on ".join([software, ", ".join(word for word in words if word) or "an unrecorded machine"]))
    return f"Trained with {'; '.join(dict.fromkeys(found))}."


def mixer(run: Summary) -> str:
    """Name the mixer of a language model's blocks; for GateLoop, its transition too."""
    names, options = run.value("model.mixer"), run.value("model.mixer_options") or {}
    if isinstance(names, list):
        return ", ".join(names)
    return f"{names}, {options['transition']}" if "transition" in options else str(names)


def family_table(family: RecipeFamily, runs: Sequence[Summary], variants: str = "*") -> str:
    """Tabulate the variants of a family that were published or have runs, with perplexities.

    Args:
        family: the recipes, and what was published for them.
        runs: what was trained; the configuration of a run tells its variant (see `variant_of`).
        variants: a pattern of the variants to list, such as *-3-layers-*.

    Raises:
        ValueError: no variant fits the pattern, or a run is of no variant.
    """
    rows = []
    for variant, its_runs in _runs_by_variant(family, runs, variants).items():
        published = show(family.published.get(variant, {}).get("test_perplexity"), 1)
        for run in its_runs:
            valid, test = show(run.valid_perplexity, 1), show(run.score("perplexity"), 1)
            minutes = show(run.seconds / 60)
            rows.append([variant, published, test, valid, epochs(run), minutes, run.precision, str(run.seed), run.name])
        if not its_runs and variant in family.published:
            rows.append([variant, published, "not run", *[NOTHING] * 6])
    heads = ["model", "published test", "test", "valid", "epochs", "minutes", "precision", "seed", "run"]
    return table(heads, rows)


def task_table(family: RecipeFamily, runs: Sequence[Summary], columns: Sequence[str], score: str = "accuracy") -> str:
    """Tabulate the test scores of runs on generated tasks, in per cent.

    Args:
        family: the recipes.
        runs: what was trained; seeds of one variant share a cell.
        columns: the ends of variants' names, such as parity; what comes before is the row.
        score: the key of the score: accuracy or scaled_accuracy.

    Raises:
        ValueError: no variant has these ends, or a run is of no variant.
    """
    by_variant = _runs_by_variant(family, runs, "*")
    rows: dict[str, list[str]] = {}
    for place, column in enumerate(columns):
        for variant, its_runs in by_variant.items():
            row = variant.removesuffix(f"-{column}")
            if row == variant:
                continue
            scores = [run.score(score) for run in sorted(its_runs, key=lambda run: run.seed)]
            cell = ", ".join(show(None if value is None else 100 * value, 1) for value in scores)
            rows.setdefault(row, [NOTHING] * len(columns))[place] = cell or NOTHING
    if not rows:
        raise ValueError(sentence("columns", list(columns), f"ends of the names in {', '.join(by_variant)}"))
    scored = {row: cells for row, cells in rows.items() if any(cell != NOTHING for cell in cells)}
    return table(["mixer", *columns], [[row, *cells] for row, cells in scored.items()])


def lengths_table(runs: Sequence[Summary], *, best_first: bool = False) -> str:
    """Tabulate the test accuracies of runs on a generated task by the length of the sequences, in per cent.

    Args:
        runs: at least one.
        best_first: order the runs by the sum of their accuracies, rather than as they are given.

    Raises:
        ValueError: there are no runs, or one has no such scores.
    """
    require_runs(runs)
    found = {run.name: scores_by_length(run) for run in runs}
    if best_first:
        found = dict(sorted(found.items(), key=lambda item: -sum(item[1].values())))
    lengths = sorted({length for scores in found.values() for length in scores})
    rows = [
        [name, *(show(100 * scores[length] if length in scores else None, 1) for length in lengths)]
        for name, scores in found.items()
    ]
    return table(["run", *(f"{length:,}" for length in lengths)], rows)


def scores_by_length(run: Summary) -> dict[int, float]:
    """Return the test accuracies of a run on a generated task, by the length of the sequences, in order.

    Scores over a range of lengths are left out.

    Raises:
        ValueError: it has none.
    """
    found = {}
    for scores in run.scores.values():
        shortest, longest = (scores["changes"].get(key, run.value(key)) for key in TEST_LENGTHS)
        if longest is not None and shortest == longest:
            found[longest] = scores["accuracy"]
    if not found:
        raise ValueError(sentence("run", f"{run.name}, without scores by length", "a scored run on a generated task"))
    return dict(sorted(found.items()))


def variants_without_runs(family: RecipeFamily, runs: Sequence[Summary], variants: str = "*") -> list[str]:
    """List the published variants that have no run; arguments as `family_table`."""
    by_variant = _runs_by_variant(family, runs, variants)
    return [variant for variant, its_runs in by_variant.items() if variant in family.published and not its_runs]


def _runs_by_variant(family: RecipeFamily, runs: Sequence[Summary], variants: str) -> dict[str, list[Summary]]:
    by_variant: dict[str, list[Summary]] = {variant: [] for variant in family.variants}
    for run in runs:
        variant = variant_of(family, run)
        if variant is None:
            raise ValueError(sentence("run", run.name, f"one of a variant of {family.path}"))
        by_variant[variant].append(run)
    chosen = {variant: its_runs for variant, its_runs in by_variant.items() if fnmatchcase(variant, variants)}
    if not chosen:
        known = ", ".join(family.variants)
        raise ValueError(sentence("variants", repr(variants), f"a pattern of some in {family.path}", f"it has {known}"))
    return chosen


def variant_of(family: RecipeFamily, run: Summary) -> str | None:
    """Find the variant that a run is of: the same experiment, model and segment. None if there is none.

    The length of training and dropout do not count.
    """
    settings = {variant: _identity(recipe) for variant, recipe in family.variants.items()}
    # A setting that all variants share, such as a dropout, belongs to their training.
    telling = {
        key for key in set().union(*settings.values()) if len({repr(one.get(key)) for one in settings.values()}) > 1
    }
    fitting = {}
    for variant, recipe in settings.items():
        own = {key: value for key, value in recipe.items() if key in telling or key in IDENTITY}
        if all(run.value(key) == value for key, value in own.items()):
            fitting[variant] = len(own)
    # A Transformer fits the variant Transformer-XL, which says nothing about the memory: the more detailed one counts.
    return max(fitting, key=fitting.__getitem__, default=None)


def _identity(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in flat(recipe)
        if key in ("experiment", "data.segment_length", "data.task", "data.n_pairs") or key.startswith("model.")
    }


def require_runs(runs: Sequence[Summary]) -> None:
    """Refuse an empty list of runs.

    Raises:
        ValueError: saying how to add runs, or to ask for them.
    """
    if not runs:
        mend = "add some with `make report RUNS=FOLDER`, or check for them in the section, {% if RUNS %}"
        raise ValueError(sentence("runs", "empty", "at least one run that has a summary", mend))
