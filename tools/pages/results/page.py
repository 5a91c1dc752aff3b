"""The page of results: what its sections may call."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import indent
from typing import Any

from recurra.checks import sentence
from recurra.runs.summary import Summary, read_summaries
from recurra.training import RecipeFamily, read_family
from tools.pages import markdown
from tools.pages.page import Page
from tools.pages.results import tables
from tools.pages.results.figures import RunFigures


class ResultsPage(Page):
    """The page of a folder with sections/NN-title.md.jinja and summaries/NAME.json.

    Args:
        folder: the page is beside it, FOLDER.md, and the figures in figures/ there.
        recipes: the folder of recipes, whose families know what was published.
        draw: False leaves the figures' files alone; the text is the same.

    Raises:
        FileNotFoundError: there are no sections.
        SummaryError: a summary cannot be read.
    """

    def __init__(self, folder: Path, *, recipes: Path, draw: bool = True) -> None:
        self.recipes = recipes
        self.all_runs = read_summaries(folder / "summaries")
        self._families: dict[str, RecipeFamily] = {}
        figures = RunFigures(folder.parent / "figures" if draw else None)
        functions: dict[str, Callable[..., Any]] = {
            "summaries": self.summaries,
            "run": self.run,
            "missing": self.missing,
            "horizon_table": tables.horizon_table,
            "family_table": self.family_table,
            "task_table": self.task_table,
            "lengths_table": tables.lengths_table,
            "family_missing": self.family_missing,
            "published": self.published,
            "epochs": tables.epochs,
            "measured_on": tables.measured_on,
            "mixer": tables.mixer,
            "curves_figure": figures.curves,
            "span_figure": figures.spans,
            "lengths_figure": figures.lengths,
            "gates_figure": figures.gates,
            "flops_figure": figures.perplexity_over_flops,
        }
        super().__init__(folder, command="make report", figures=figures, functions=functions)

    def summaries(
        self, names: str | Sequence[str] = "*", *, experiment: str = "*", where: Mapping[str, Any] = {}
    ) -> list[Summary]:
        """Choose runs that have a summary, in the order of `names`, then by name.

        Args:
            names: a name or a pattern such as memory-horizon-*, or several.
            experiment: the kind of experiment, or a pattern such as text-*.
            where: values of the configuration by dotted key, such as {"data.segment_length": 35}.
        """
        patterns = [names] if isinstance(names, str) else list(names)
        named = {run.name: run for pattern in patterns for run in self.all_runs if fnmatchcase(run.name, pattern)}
        return [
            run
            for run in named.values()
            if fnmatchcase(run.config["experiment"], experiment)
            and all(run.value(key) == value for key, value in where.items())
        ]

    def run(self, name: str) -> Summary:
        """Look up one run. Raises ValueError if it has no summary."""
        for run in self.all_runs:
            if run.name == name:
                return run
        known = ", ".join(run.name for run in self.all_runs) or "none"
        raise ValueError(sentence("run", repr(name), f"one that has a summary: {known}"))

    def missing(self, names: Sequence[str], run: str, command: str) -> str:
        """List the commands for runs that have no summary; nothing if all have one.

        Args:
            names: of recipes, for example.
            run: the name of each one's run, in which {} stands for the name.
            command: what trains it, with {} likewise.
        """
        known = {other.name for other in self.all_runs}
        return _to_do([name for name in names if run.replace("{}", name) not in known], run, command)

    def family_table(self, family: str, runs: Sequence[Summary], variants: str = "*") -> str:
        """Tabulate variants of a family with published and measured perplexities; `family`: its file in the recipes."""
        return tables.family_table(self._family(family), runs, variants)

    def task_table(self, family: str, runs: Sequence[Summary], columns: Sequence[str], score: str = "accuracy") -> str:
        """Tabulate the scores of a family's runs on generated tasks, a column for each end of a variant's name."""
        return tables.task_table(self._family(family), runs, columns, score)

    def family_missing(self, family: str, runs: Sequence[Summary], variants: str = "*") -> str:
        """List the commands for published variants of a family without a run; nothing if all have one."""
        absent = tables.variants_without_runs(self._family(family), runs, variants)
        command = f"recurra train recipes/{family}#{{}} --data.path FOLDER"
        return _to_do(absent, f"{Path(family).parent.name}-{{}}", command)

    def published(self, family: str, variant: str | Summary) -> Mapping[str, Any]:
        """Look up what was published for a variant of a family, or for the variant of a run; empty if nothing was.

        Raises:
            RecipeError: there is no such variant.
        """
        whole = self._family(family)
        name = tables.variant_of(whole, variant) if isinstance(variant, Summary) else variant
        if name is None:
            return {}
        whole.variant(name)
        return whole.published.get(name, {})

    def _family(self, file: str) -> RecipeFamily:
        if file not in self._families:
            self._families[file] = read_family(self.recipes / file)
        return self._families[file]


def _to_do(names: Sequence[str], run: str, command: str) -> str:
    """List the commands for missing runs; {} stands for a name."""
    if not names:
        return ""
    one = len(names) == 1
    what = (
        "1 run is missing here:" if one else f"{len(names)} runs are missing here; NAME is one of {', '.join(names)}:"
    )
    lines = [command, f"recurra eval runs/{run}", f"make report RUNS=runs/{run}"]
    commands = indent("\n".join(lines).replace("{}", names[0] if one else "NAME"), "    ")
    return f"{markdown.paragraph(what)}\n{commands}"
