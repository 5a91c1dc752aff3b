"""Figures at a low resolution, for tests that do not look at pixels: those of the files take most of the time."""

from collections.abc import Iterator

import pytest

from recurra.analysis.plots.figure import STYLE

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
            patch.setitem(STYLE, "savefig.dpi", dots_per_inch)
        yield
