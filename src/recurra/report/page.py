"""The page: its sections in order, Markdown with Jinja's expressions where numbers, tables and figures come in."""

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import fill, indent
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError, TemplateSyntaxError

from recurra.report import tables
from recurra.report.figures import Figures
from recurra.runs.summary import Summary, read_summaries
from recurra.training import RecipeFamily, read_family

SECTION = "*.md.jinja"
WIDTH = 125
"""Of the lines that are broken here; sections break theirs by hand."""


class ReportError(ValueError):
    """A section that cannot be put on the page; the message names its file and line."""


class Page:
    """The page of a folder that holds sections/NN-title.md.jinja and summaries/NAME.json.

    Args:
        folder: the page lies beside it, FOLDER.md, and the figures in figures/ there.
        recipes: the folder of recipes, whose families know what was published.
        draw: False leaves the figures' files alone; the text is the same.

    Raises:
        FileNotFoundError: there are no sections.
        SummaryError: a summary cannot be read.
    """

    def __init__(self, folder: Path, *, recipes: Path, draw: bool = True) -> None:
        self.folder, self.recipes = folder, recipes
        self.file = folder.with_name(folder.name + ".md")
        self.sections = sorted((folder / "sections").glob(SECTION))
        if not self.sections:
            raise FileNotFoundError(f"there are no sections {folder / 'sections' / SECTION} to make a page of")
        self.all_runs = read_summaries(folder / "summaries")
        self._families: dict[str, RecipeFamily] = {}
        self.figures = Figures(folder.parent / "figures" if draw else None)
        loader = FileSystemLoader(folder / "sections")
        self._environment = Environment(
            loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
        )
        self._environment.filters["show"] = tables.show
        self._environment.globals.update(self.functions())

    def functions(self) -> dict[str, Callable[..., Any]]:
        """What sections may call, by name."""
        return {
            "summaries": self.summaries,
            "run": self.run,
            "missing": self.missing,
            "horizon_table": tables.horizon_table,
            "family_table": self.family_table,
            "family_missing": self.family_missing,
            "published": self.published,
            "epochs": tables.epochs,
            "measured_on": tables.measured_on,
            "mixer": tables.mixer,
            "curves_figure": self.figures.curves,
            "span_figure": self.figures.spans,
            "gates_figure": self.figures.gates,
            "flops_figure": self.figures.perplexity_over_flops,
        }

    def render(self) -> str:
        """The text of the page; draws its figures.

        Raises:
            ReportError: a section has a mistake.
        """
        place = "/".join(self.folder.absolute().parts[-2:])
        note = f"<!-- Built by `make report` from {place}/: change the sections there, not this page. -->"
        # What a template leaves out leaves blank lines behind.
        texts = [re.sub(r"\n{3,}", "\n\n", self._rendered(section)).strip("\n") for section in self.sections]
        return note + "\n" + "\n\n".join(text for text in texts if text) + "\n"

    def _rendered(self, section: Path) -> str:
        try:
            return self._environment.get_template(section.name).render()
        except (TemplateError, ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise ReportError(f"{section}, line {_line(error, section.name)}: {error}") from error

    # --- what sections call ---

    def summaries(
        self, names: str | Sequence[str] = "*", *, experiment: str = "*", where: Mapping[str, Any] = {}
    ) -> list[Summary]:
        """The runs that there are summaries of, in the order of `names`, then by name.

        Args:
            names: a name or a pattern such as memory-horizon-*, or several.
            experiment: the kind of experiment, or a pattern of it, such as text-*.
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
        """One run. Raises ValueError where there is no such summary."""
        for run in self.all_runs:
            if run.name == name:
                return run
        known = ", ".join(run.name for run in self.all_runs) or "none"
        raise ValueError(f"there is no summary of a run {name!r}; there are: {known}")

    def missing(self, names: Sequence[str], run: str, command: str) -> str:
        """What to type for those runs that there is no summary of; nothing where all are there.

        Args:
            names: of recipes, say.
            run: the name of each one's run; {} stands for the name in it.
            command: what trains it, {} likewise.
        """
        known = {other.name for other in self.all_runs}
        return _to_do([name for name in names if run.replace("{}", name) not in known], run, command)

    def family_table(self, family: str, runs: Sequence[Summary], rows: str = "*") -> str:
        """Rows of a family of recipes, published and measured perplexities; `family`: its file below the recipes."""
        return tables.family_table(self._family(family), runs, rows)

    def family_missing(self, family: str, runs: Sequence[Summary], rows: str = "*") -> str:
        """What to type for the published rows of a family that no run is of; nothing where all have one."""
        absent = tables.rows_without_runs(self._family(family), runs, rows)
        command = f"recurra train recipes/{family}#{{}} --data.path FOLDER"
        return _to_do(absent, f"{Path(family).parent.name}-{{}}", command)

    def published(self, family: str, row: str | Summary) -> Mapping[str, Any]:
        """What was published about a variant of a family, by name, or about the variant of a run; empty if nothing was.

        Raises:
            RecipeError: there is no such variant.
        """
        whole = self._family(family)
        name = tables.family_row(whole, row) if isinstance(row, Summary) else row
        if name is None:
            return {}
        whole.variant(name)
        return whole.published.get(name, {})

    def _family(self, file: str) -> RecipeFamily:
        if file not in self._families:
            self._families[file] = read_family(self.recipes / file)
        return self._families[file]


def _to_do(names: Sequence[str], run: str, command: str) -> str:
    """The commands for runs that are missing; {} stands for a name."""
    if not names:
        return ""
    one = len(names) == 1
    what = (
        "1 run is missing here:" if one else f"{len(names)} runs are missing here; NAME is one of {', '.join(names)}:"
    )
    lines = [command, f"recurra eval runs/{run}", f"recurra report --add runs/{run}"]
    commands = indent("\n".join(lines).replace("{}", names[0] if one else "NAME"), "    ")
    return f"{fill(what, WIDTH, break_on_hyphens=False, break_long_words=False)}\n\n{commands}"


def _line(error: BaseException, section: str) -> int | str:
    """The line of a section at which an error came up: Jinja puts the lines of its templates into tracebacks."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == section
    ]
    return lines[-1] if lines and lines[-1] is not None else "?"
