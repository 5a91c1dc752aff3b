import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tests.small_figures import dots_per_inch, small_figures  # noqa: F401

from recurra.analysis.gates import GateRecord

RESET = 5


@pytest.fixture
def make_record() -> Callable[..., GateRecord]:
    """A record of two sequences; gates close at reset tokens, which are at steps 3 and L - 2 of the first."""

    def make(n_steps: int = 16, channels: tuple[int, ...] = (4, 4)) -> GateRecord:
        torch.manual_seed(0)
        tokens = torch.randint(0, RESET, (2, n_steps))
        if n_steps > 4:
            tokens[0, [3, n_steps - 2]] = RESET
        open_ = (tokens != RESET)[..., None]
        return GateRecord(
            layers=tuple(range(0, 2 * len(channels), 2)),
            magnitudes=tuple((0.3 + 0.7 * torch.rand(2, n_steps, n)) * open_ for n in channels),
            phases=tuple(10 * torch.randn(2, n_steps, n) for n in channels),
            tokens=tokens,
        )

    return make


@pytest.fixture
def assert_stacked() -> Callable[[Sequence[Axes]], None]:
    """Fails unless the axes are stacked in order, inside the saved figure and large enough to read."""

    def check(column: Sequence[Axes]) -> None:
        page = column[0].figure.bbox
        boxes = [axes.get_window_extent() for axes in column]
        assert all(page.ymin <= box.ymin and box.ymax <= page.ymax for box in boxes)
        assert all(upper.ymin > lower.ymax for upper, lower in itertools.pairwise(boxes))
        assert min(min(box.height, box.width) for box in boxes) > 20

    return check


@pytest.fixture
def assert_inside() -> Callable[[Figure], None]:
    """Fails unless every text and legend of a figure lies inside it, once it is drawn."""

    def check(figure: Figure) -> None:
        figure.draw_without_rendering()
        page = figure.bbox.expanded(1.001, 1.001)
        shown = [(text.get_text(), text) for axes in figure.axes for text in (*axes.texts, axes._left_title)]
        shown += [(axis.label.get_text(), axis.label) for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
        shown += [("legend", legend) for legend in figure.legends]
        boxes = {what: artist.get_window_extent() for what, artist in shown if what}
        assert [what for what, box in boxes.items() if not (page.contains(*box.min) and page.contains(*box.max))] == []

    return check
