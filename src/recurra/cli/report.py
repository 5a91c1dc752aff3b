"""`recurra report`: the page of results, from sections and summaries of runs."""

from collections.abc import Sequence
from pathlib import Path

from recurra.cli.arguments import command_parser, split_overrides
from recurra.cli.summarise import summarise
from recurra.data.files import replacing
from recurra.report import Page, write_summary

DESCRIPTION = (
    "Build a page of results, FOLDER.md, from FOLDER/sections/*.md.jinja and FOLDER/summaries/*.json, with its figures "
    "in figures/ beside it. --add first writes the summaries of runs, whose folders the page then no longer needs. "
    "--data.path FOLDER says where a run's corpus is now."
)


def run(words: Sequence[str]) -> int:
    """Write summaries, figures and the page, and print their paths."""
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
    for added in arguments.add:
        print(write_summary(folder / "summaries", summarise(added, recipes, overrides)))
    page = Page(folder, recipes=recipes)
    text = page.render()
    with replacing(page.file) as file:
        file.write(text.encode())
    for path in [*page.figures.written, page.file]:
        print(path)
    return 0
