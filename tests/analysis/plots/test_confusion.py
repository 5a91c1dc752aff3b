from itertools import pairwise

import torch

from recurra.analysis.plots.figure import save_png
from recurra.analysis.plots.scores import confusion_matrix

NAMES = ["left", "right", "up"]
COUNTS = torch.tensor([[3, 1, 0], [0, 0, 0], [2, 2, 4]])


def image(figure):
    (axes, *_) = figure.axes
    return axes, axes.get_images()[0]


def test_rows_are_shares_and_an_empty_class_has_none():
    _, drawn = image(confusion_matrix(COUNTS, NAMES))
    shares = drawn.get_array()
    assert shares[0].tolist() == [0.75, 0.25, 0.0]
    assert shares[2].tolist() == [0.25, 0.25, 0.5]
    assert shares.mask[1].all()
    assert not shares.mask[[0, 2]].any()
    assert drawn.get_clim() == (0, 1)


def test_names_stand_on_both_axes_and_counts_beside_the_rows():
    axes, _ = image(confusion_matrix(COUNTS, NAMES))
    assert [label.get_text() for label in axes.get_xticklabels()] == NAMES
    assert [label.get_text() for label in axes.get_yticklabels()] == NAMES
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "true")
    beside = {text.get_position()[1]: text.get_text() for text in axes.texts if text.get_position()[0] > 2.5}
    assert beside == {0: "4", 1: "0", 2: "8"}


def test_the_names_of_31_classes_do_not_overlap(tmp_path):
    figure = confusion_matrix(torch.eye(31, dtype=torch.int64), [f"Makecoffee.Pourwater{i}" for i in range(31)])
    save_png(figure, tmp_path, "confusion")
    axes, _ = image(figure)
    boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert not any(one.overlaps(other) for one, other in pairwise(boxes))
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert not any(one.overlaps(other) for one, other in pairwise(boxes))
    assert all(box.y0 >= 0 for box in boxes)
