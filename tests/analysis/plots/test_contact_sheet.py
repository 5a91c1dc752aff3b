import pytest
import torch

from recurra.analysis.plots.scores import _FRAMES_PER_ROW, _shown_classes, contact_sheet

FRAMES = torch.arange(11, dtype=torch.uint8)[:, None, None, None].expand(11, 6, 8, 3).contiguous()
TIMES = [0.5 * i for i in range(10)] + [61.25]
PROBABILITIES = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]])


def parts(figure):
    sheet, chart = figure.subfigs
    return sheet.axes, chart.axes[0]


def test_every_frame_stands_with_its_time():
    pictures, _ = parts(contact_sheet(FRAMES, TIMES, [2.0, 4.0], PROBABILITIES, ["a", "b", "c"]))
    assert len(pictures) == 2 * _FRAMES_PER_ROW
    filled = [axes for axes in pictures if axes.get_images()]
    assert [int(axes.get_images()[0].get_array()[0, 0, 0]) for axes in filled] == list(range(11))
    assert [axes.get_title(loc="left") for axes in filled][:2] == ["0.0 s", "0.5 s"]
    assert filled[-1].get_title(loc="left") == "1:01.2"


def test_the_lines_are_the_likeliest_classes_over_time():
    _, chart = parts(contact_sheet(FRAMES, TIMES, [2.0, 4.0], PROBABILITIES, ["a", "b", "c"]))
    lines = {line.get_label(): (line.get_xdata().tolist(), line.get_ydata().tolist()) for line in chart.get_lines()}
    assert list(lines) == ["a", "c", "b"]
    assert lines["c"] == ([2.0, 4.0], pytest.approx([0.1, 0.6]))


def test_classes_are_chosen_by_their_highest_moment():
    assert _shown_classes(torch.tensor([[0.4, 0.3, 0.3], [0.0, 0.1, 0.9]]), 2) == [2, 0]
    assert _shown_classes(torch.full((1, 3), 1 / 3), 2) == [0, 1]
