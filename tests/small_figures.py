"""Figures at a low resolution, for tests that do not look at pixels: those of the files take most of the time."""

from collections.abc import Iterator

import pytest
from matplotlib.figure import Figure

from recurra.analysis.plots.figure import _STYLE

in_full = pytest.mark.parametrize("dots_per_inch", [None])
"""A test whose figures are saved as users get them."""


@pytest.fixture
def dots_per_inch() -> int | None:
    """The resolution of saved figures; None leaves it as it is."""
    return 50


@pytest.fixture(autouse=True)
def small_figures(dots_per_inch: int | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if dots_per_inch is not None:
            patch.setitem(_STYLE, "savefig.dpi", dots_per_inch)
        yield


@pytest.fixture
def unrendered_figures(monkeypatch) -> None:
    """Figures are made and their files are written, without the picture: for tests of which there are."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **options: file.write(b"figure"))
