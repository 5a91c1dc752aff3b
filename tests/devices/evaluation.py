"""Scores of a model on another device are those on the CPU."""

import torch
from tests.devices.elsewhere import DEVICE
from tests.streams.conftest import VOCABULARY, build
from torch import Tensor, nn

from recurra.data.batches import IGNORED_TARGET, Batch
from recurra.train.evaluate import EvaluationResult, best_temperature, evaluate
from recurra.video.task import _classify_stream


class Batches:
    """Two batches of a text, the second of which continues the first; some targets are ignored."""

    batch_size = 2

    def __init__(self) -> None:
        tokens = torch.randint(VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(0))
        targets = tokens.roll(-1, 1).masked_fill(tokens == 3, IGNORED_TARGET)
        pieces = zip(tokens.split(9, 1), targets.split(9, 1))
        self._batches = [Batch(x, y, bool(number)) for number, (x, y) in enumerate(pieces)]

    def __len__(self) -> int:
        return len(self._batches)

    def batch(self, epoch: int, step: int) -> Batch:
        return self._batches[step]


class Frames(nn.Module):
    """Sums what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]))

    def forward(self, clip: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = clip.mean() + (0.0 if state is None else state)
        return (total * self.scale)[None, None], total


def scores(model: nn.Module) -> list[object]:
    source = Batches()
    plain, cooler = evaluate(model, source), evaluate(model, source, temperature=0.7)
    return [*map(_numbers, (plain, cooler)), best_temperature(model, source)]


def _numbers(result: EvaluationResult) -> tuple[object, ...]:
    return round(result.loss, 9), result.accuracy, result.n_targets


def classified(model: nn.Module) -> list[Tensor]:
    frames = [(0.1 * number, torch.full((1, 2, 2), float(number))) for number in range(5)]
    return [seen.probabilities for seen in _classify_stream(model, frames, n_frames=2, frame_seconds=0.1)]


def check_evaluation() -> None:
    for name in ("gateloop", "crt-gru"):
        print(name, flush=True)
        model = build(name)
        expected = scores(model)
        assert scores(model.to(DEVICE)) == expected, name
    frames = Frames()
    expected_classes = classified(frames)
    torch.testing.assert_close(classified(frames.to(DEVICE)), expected_classes)
