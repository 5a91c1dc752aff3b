"""`recurra report`: the page of results, from sections and summaries of runs."""

from collections.abc import Sequence
from pathlib import Path

from recurra.cli.arguments import command_parser, split_overrides
from recurra.data.files import replacing
from recurra.report import Page, write_summary
from recurra.runs.summarise import summarise

DESCRIPTION = (
    "Build a page of results, FOLDER.md, from FOLDER/sections/*.md.jinja and FOLDER/summaries/*.json, with its figures "
    "in figures/ beside it. --add first writes the summaries of runs, whose folders the page then no longer needs. "
    "--data.path FOLDER says where a run's corpus is now."
)


def run(words: Sequence[str]) -> int:
    """Write summaries, figures and the page, and print their paths.

    Raises:
        ValueError: some runs have no summary; the page stands, with the others.
    """
    own, overrides = split_overrides(words)
    parser = command_parser("report", DESCRIPTION, overrides=False)
    parser.add_argument("folder", nargs="?", default="docs/results", metavar="FOLDER", help="default: docs/results")
    parser.add_argument(
        "--add", nargs="+", action="extend", default=[], metavar="RUN", help="folders of runs whose summaries to write"
    )
    parser.add_argument(
        "--recipes", default="recipes", metavar="FOLDER", help="the folder of recipes (default: recipes)"
    )
    arguments = parser.parse_args(own)
    if overrides and not arguments.add:
        raise ValueError(f"{overrides[0]} says something of a run: give its folder with --add")
    folder, recipes = Path(arguments.folder), Path(arguments.recipes)
    refused = _add(arguments.add, folder / "summaries", recipes, overrides)
    page = Page(folder, recipes=recipes)
    text = page.render()
    with replacing(page.file) as file:
        file.write(text.encode())
    for path in [*page.figures.written, page.file]:
        print(path)
    if refused:
        raise ValueError("\n".join(["no summary was written of", *refused]))
    return 0


def _add(runs: Sequence[str], summaries: Path, recipes: Path, overrides: Sequence[str]) -> list[str]:
    """Write the summaries of all runs that have one; give what is wrong with the others, a line each."""
    refused = []
    for run in runs:
        try:
            print(write_summary(summaries, summarise(run, recipes, overrides)))
        except (ValueError, OSError) as error:
            refused.append(f"{run}: {error}")
    return refused
