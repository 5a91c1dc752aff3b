"""`python -m tools.pages results`: build a page of results, after adding summaries of runs if asked to."""

from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path

from recurra.cli.arguments import split_overrides
from recurra.runs.summarise import summarise
from recurra.runs.summary import write_summary
from tools.pages.results.page import ResultsPage

DESCRIPTION = """\
Build a page of results, FOLDER.md, from FOLDER/sections/*.md.jinja and FOLDER/summaries/*.json; its figures go into
figures/ beside it. --add first writes summaries of runs, whose folders the page then no longer needs. --data.path
FOLDER says where the corpus of such a run is now."""


def run(words: Sequence[str]) -> Iterator[Path]:
    """Write summaries, figures and the page, and yield their paths.

    Raises:
        ValueError: some runs could not be summarised; the page is built with the others.
    """
    own, overrides = split_overrides(words)
    parser = ArgumentParser(prog="python -m tools.pages results", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("docs/results"),
        metavar="FOLDER",
        help="folder of the page (default: docs/results)",
    )
    parser.add_argument(
        "--add", nargs="+", action="extend", default=[], metavar="RUN", help="folders of runs to summarise first"
    )
    parser.add_argument(
        "--recipes", type=Path, default=Path("recipes"), metavar="FOLDER", help="folder of recipes (default: recipes)"
    )
    arguments = parser.parse_args(own)
    if overrides and not arguments.add:
        raise ValueError(f"{overrides[0]} is for runs; expected it together with --add RUN")
    names = [Path(path).resolve().name for path in arguments.add]
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise ValueError(f"--add has two runs named {twice[0]}; expected different names: each is that of a summary")
    refused = []
    for path in arguments.add:
        try:
            yield write_summary(arguments.folder / "summaries", summarise(path, arguments.recipes, overrides))
        except (ValueError, OSError) as error:
            refused.append(f"{path}: {error}")
    yield from ResultsPage(arguments.folder, recipes=arguments.recipes).write()
    if refused:
        raise ValueError("\n".join(["these runs could not be summarised:", *refused]))
