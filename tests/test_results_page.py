"""docs/results.md is what its sections and summaries give: nobody has edited the built page."""

import dataclasses
import re
from pathlib import Path

import pytest
from tools.pages.results.page import ResultsPage

from recurra.training import read_family, split_variant

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "results"
TEXT = FOLDER.with_suffix(".md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page() -> ResultsPage:
    return ResultsPage(FOLDER, recipes=ROOT / "recipes", draw=False)


def test_the_page_is_what_its_sections_and_summaries_give(page):
    assert page.render() == TEXT, "docs/results.md differs: change docs/results/, not the page, and run `make report`"


def test_runs_that_were_not_evaluated_stand_on_the_page():
    page = ResultsPage(FOLDER, recipes=ROOT / "recipes", draw=False)
    patterns = ("memory-horizon-*-tenth", "ptb-*-8-epochs")
    names = [pattern.replace("*", "new") for pattern in patterns]
    for pattern, name in zip(patterns, names):
        page.all_runs.append(dataclasses.replace(page.summaries(pattern)[0], name=name, scores={}))
    unscored = [line for line in page.render().splitlines() if "| - |" in line]
    assert [name for name in names if not any(name in line for line in unscored)] == []


def test_its_sections_are_numbered_in_order():
    numbers = [int(number) for number in re.findall(r"^## (\d+)\. ", TEXT, flags=re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    files = sorted((FOLDER / "sections").glob("*.md.jinja"))
    assert [int(file.name[:2]) for file in files] == [0, *numbers]


def test_its_figures_are_there():
    links = re.findall(r"\]\((figures/[^)]+)\)", TEXT)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).is_file()] == []


def test_its_recipes_are_there():
    named = set(re.findall(r"recipes/[\w-]+/[\w-]+\.yaml(?:#[\w-]+)?", TEXT)) - {"recipes/memory-horizon/NAME.yaml"}
    for word in named:
        path, variant = split_variant(ROOT / word)
        assert path.is_file(), word
        if variant not in (None, "NAME"):
            assert variant in read_family(path).variants, word


def test_names_that_stand_for_recipes_do(page):
    text = (FOLDER / "sections" / "18-memory-horizon-in-full.md.jinja").read_text()
    names = re.findall(r'"([\w-]+)"', "".join(re.findall(r"missing\(\[(.*?)\]", text, flags=re.DOTALL)))
    assert len(names) > 2
    assert [name for name in names if not (ROOT / "recipes" / "memory-horizon" / f"{name}.yaml").is_file()] == []


def test_summaries_are_small_and_name_no_place_on_a_machine(page):
    for run in page.all_runs:
        file = FOLDER / "summaries" / f"{run.name}.json"
        assert file.stat().st_size < 60_000
        text = file.read_text()
        assert not re.search(r'"(/|\.\.|~)', text)


def test_the_readme_names_what_sections_may_call(page):
    text = (FOLDER / "README.md").read_text()
    assert [name for name in page.functions if f"`{name}(" not in text] == []
