"""A folder to build a page of results from, with made-up summaries."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.scored_runs import scored  # noqa: F401
from tests.summaries import make_summary  # noqa: F401
from tools.pages.results.page import ResultsPage

from recurra.runs.summary import Summary, write_summary


@pytest.fixture
def make_page(tmp_path: Path) -> Callable[..., ResultsPage]:
    """make_page({"01-a": text}, summaries): the page of these sections."""

    def make(sections: dict[str, str], summaries: tuple[Summary, ...] = (), *, draw: bool = True) -> ResultsPage:
        folder = tmp_path / "docs" / "results"
        (folder / "sections").mkdir(parents=True, exist_ok=True)
        for name, text in sections.items():
            (folder / "sections" / f"{name}.md.jinja").write_text(text)
        for summary in summaries:
            write_summary(folder / "summaries", summary)
        return ResultsPage(folder, recipes=tmp_path / "recipes", draw=draw)

    return make
