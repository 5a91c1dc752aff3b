import math

import pytest
import torch
from torch import nn

from recurra.data.batches import IGNORED_TARGET
from recurra.video.data import ViewBatch
from recurra.video.task import class_scores, classify_videos


@pytest.mark.parametrize(("n_classes", "ties"), [(2, False), (5, True), (6, True), (11, False)])
def test_random_scores_are_those_of_a_loop(n_classes, ties):
    """With ties, and with empty classes, predicted or not: their accuracy is NaN, and the mean omits them."""
    for n_examples in (1, 3, 40):
        probabilities = torch.rand(n_examples, n_classes, dtype=torch.float64)
        if ties:
            probabilities = (4 * probabilities).round() / 4
        targets = torch.randint(n_classes - 1, (n_examples,))  # the last class stays empty
        scores = class_scores(probabilities, targets)
        confusion = [[0] * n_classes for _ in range(n_classes)]
        n_in_top_5 = 0
        for row, target in zip(probabilities.tolist(), targets.tolist()):
            confusion[target][row.index(max(row))] += 1
            n_in_top_5 += target in sorted(range(n_classes), key=lambda c: -row[c])[:5]
        assert scores.confusion.tolist() == confusion
        counts = [sum(row) for row in confusion]
        right = [confusion[c][c] for c in range(n_classes)]
        shares = [right[c] / counts[c] if counts[c] else math.nan for c in range(n_classes)]
        assert list(map(str, scores.class_accuracies.tolist())) == list(map(str, shares))
        present = torch.tensor([share for share in shares if not math.isnan(share)], dtype=torch.float64)
        assert scores.mean_class_accuracy == pytest.approx(float(present.mean()), rel=1e-15)
        assert scores.top_1 == sum(right) / n_examples
        if n_classes <= 5:
            assert scores.top_5 is None
        else:
            assert scores.top_5 == n_in_top_5 / n_examples


class Corner(nn.Module):
    """A segment's logits are the first three pixels of its first frame, summed with those of earlier segments."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.one = nn.Parameter(torch.ones((), dtype=dtype))
        self.modes = []

    def forward(self, clip, state=None):
        assert state is None
        self.modes.append(self.training)
        assert not torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        segments = clip[:, ::2, 0, 0, :3].to(self.one.dtype) * self.one
        return segments.cumsum(1), None


def views(rows, labels, sizes):
    """Views as (video, first segment's pixels, second segment's pixels), in batches of these sizes."""
    clips = torch.zeros(len(rows), 4, 3, 4, 4)
    for row, (_, first, second) in enumerate(rows):
        clips[row, 0, 0, 0, :3], clips[row, 2, 0, 0, :3] = torch.tensor(first), torch.tensor(second)
    targets = torch.tensor([[IGNORED_TARGET, labels[video]] for video, *_ in rows])
    videos = torch.tensor([video for video, *_ in rows])
    parts = zip(clips.split(sizes), targets.split(sizes), videos.split(sizes))
    return [ViewBatch(*part) for part in parts]


ROWS = [
    (1, [0.0, 0, 0], [0.0, 9, 0]),
    (0, [2.0, 0, 0], [1.0, 0, 0]),
    (1, [0.0, 0, 5], [1.0, 0, 0]),
    (0, [0.0, 0, 1], [0.0, 0, 0]),
    (1, [0.0, 1, 0], [0.0, 1, 0]),
]


@pytest.mark.parametrize("sizes", [[5], [2, 3], [1, 1, 1, 1, 1]])
def test_the_views_of_a_video_are_averaged_after_the_softmax_of_its_last_segment(sizes):
    result = classify_videos(Corner(), views(ROWS, {0: 0, 1: 2}, sizes))
    expected = torch.zeros(2, 3, dtype=torch.float64)
    for video, first, second in ROWS:
        logits = torch.tensor(first, dtype=torch.float64) + torch.tensor(second)
        expected[video] += logits.softmax(0) / sum(row[0] == video for row in ROWS)
    torch.testing.assert_close(result.probabilities, expected, rtol=0, atol=1e-12)
    assert result.targets.tolist() == [0, 2]
    assert result.n_frames == 5 * 4


def test_a_view_that_could_not_be_decoded_does_not_count():
    batch = views(ROWS, {0: 0, 1: 2}, [5])[0]
    batch.targets[[1, 3]] = IGNORED_TARGET  # all of video 0
    batch.targets[0] = IGNORED_TARGET  # one of video 1
    result = classify_videos(Corner(), [batch])
    assert result.targets.tolist() == [2]
    expected = (torch.tensor([1.0, 0, 5]).double().softmax(0) + torch.tensor([0.0, 2, 0]).double().softmax(0)) / 2
    torch.testing.assert_close(result.probabilities[0], expected, rtol=0, atol=1e-12)
    batch.targets[:] = IGNORED_TARGET
    with pytest.raises(ValueError, match="views is without a view to score"):
        classify_videos(Corner(), [batch])
