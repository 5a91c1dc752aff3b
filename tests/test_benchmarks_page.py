"""docs/benchmarks.md is what its sections and its record give: nobody has edited the built page."""

import re
from pathlib import Path

import pytest
from tools.pages.benchmarks.page import BenchmarksPage

from tools.pages.benchmarks import record

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def text() -> str:
    return (DOCS / "benchmarks.md").read_text(encoding="utf-8")


def test_the_page_is_what_its_sections_and_record_give(text):
    page = BenchmarksPage(DOCS / "benchmarks", record.load(DOCS / "figures" / "benchmarks.json"), draw=False)
    assert page.render() == text, "docs/benchmarks.md differs: change docs/benchmarks/, and run with --draw-only"


def test_its_figures_are_there(text):
    links = re.findall(r"\]\((figures/[^)]+\.png)\)", text)
    assert len(links) > 3
    assert [link for link in links if not (DOCS / link).is_file()] == []
