import math
from typing import NamedTuple

import pytest
import torch
from tests.train.conftest import Batches
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from recurra.data.batches import IGNORED_TARGET, Batch
from recurra.data.memory_horizon import memory_spans
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig
from recurra.train.evaluate import (
    AroundResets,
    best_temperature,
    evaluate,
    evaluate_by_span,
    perplexity,
    scaled_accuracy,
)


class Sum(NamedTuple):
    total: Tensor


class Accumulator(nn.Module):
    """Logits that depend on everything since the start of the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, 5)
        self.dtypes: list[torch.dtype] = []

    def forward(self, tokens: Tensor, state: Sum | None = None) -> tuple[Tensor, Sum]:
        assert torch.is_inference_mode_enabled()
        total = self.dropout(self.embedding(tokens)).cumsum(1)
        if state is not None:
            total = total + state.total[:, None]
        logits = self.head(total)
        self.dtypes.append(logits.dtype)
        return logits, Sum(total[:, -1])


@pytest.fixture
def model() -> Accumulator:
    torch.manual_seed(0)
    return Accumulator()


@pytest.fixture
def stream() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    targets = torch.randint(5, (2, 12))
    targets[0, 3] = targets[1, 7:10] = IGNORED_TARGET
    return torch.randint(6, (2, 12)), targets


def cut(stream: tuple[Tensor, Tensor], *lengths: int) -> Batches:
    """The stream in pieces, each continuing the previous one."""
    pieces = zip(*(tensor.split(lengths, dim=1) for tensor in stream))
    return Batches(*(Batch(*piece, continues=number > 0) for number, piece in enumerate(pieces)))


@torch.inference_mode()
def scores(model: Accumulator, stream: tuple[Tensor, Tensor]) -> tuple[float, float, int]:
    """Loss, accuracy and number of targets by hand, over the whole stream at once."""
    model.eval()
    inputs, targets = stream
    counted = targets != IGNORED_TARGET
    logits = model(inputs)[0][counted].double()
    chosen = log_softmax(logits, -1).gather(1, targets[counted][:, None])
    right = (logits.argmax(-1) == targets[counted]).double().mean().item()
    model.train()
    return -chosen.mean().item(), right, int(counted.sum())


@pytest.mark.parametrize("lengths", [(12,), (5, 7), (1,) * 12])
def test_the_state_is_carried_and_ignored_targets_do_not_count(model, stream, lengths):
    result = evaluate(model, cut(stream, *lengths))
    loss, accuracy, n_targets = scores(model, stream)
    assert result.n_targets == n_targets == 20
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert result.accuracy == accuracy
    assert result.perplexity == pytest.approx(math.exp(loss), rel=1e-6)
    assert result.bits_per_token == pytest.approx(loss / math.log(2), rel=1e-6)
    assert result.tokens_per_second == pytest.approx(24 / result.seconds)


def test_logits_are_divided_by_the_temperature(model, stream):
    result = evaluate(model, cut(stream, 5, 7), temperature=1.7)
    with torch.no_grad():
        model.head.weight /= 1.7
        model.head.bias /= 1.7
    colder = evaluate(model, cut(stream, 5, 7))
    assert result.loss == pytest.approx(colder.loss, rel=1e-6)
    assert result.accuracy == colder.accuracy


def drawn(model, temperature):
    """Targets drawn from what the model says at a temperature."""
    tokens = torch.randint(6, (2000, 30))
    with torch.inference_mode():
        model.head.weight *= 2
        logits = model.eval()(tokens)[0] / temperature
    targets = logits.softmax(-1).flatten(0, 1).multinomial(1).view_as(tokens)
    targets[:, ::7] = IGNORED_TARGET
    return cut((tokens, targets), 10, 20)


@pytest.mark.parametrize("right", [0.4, 3.0])
def test_a_temperature_far_from_one_is_found_and_the_source_is_read_once(model, right):
    source = drawn(model, right)
    model.dtypes.clear()
    assert best_temperature(model, source) == right
    assert len(model.dtypes) == len(source)


class FixedLosses(nn.Module):
    """Returns the losses that it was built with, in float32."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.losses = nn.Parameter(torch.tensor([losses]))

    def loss(self, inputs, targets, state=None):
        return self.losses, None


def test_a_model_that_forms_no_logits_has_no_accuracy_and_cannot_be_observed():
    batch = Batch(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64), continues=False)
    model, source = FixedLosses([1.0, 3.0]), Batches(batch)
    result = evaluate(model, source)
    assert (result.loss, result.accuracy) == (2.0, None)
    with pytest.raises(ValueError, match="observe is a function, with a FixedLosses; expected None"):
        evaluate(model, source, observe=lambda batch, predictions: None)


def test_accuracy_by_span_counts_each_target_under_its_span(model, stream):
    source = cut(stream, 5, 7)
    result, spans = evaluate_by_span(model, source, lambda tokens: memory_spans(tokens, reset_token=5))
    assert int(spans.counts.sum()) == result.n_targets
    assert spans.overall == pytest.approx(result.accuracy)
    expected = torch.zeros(len(spans.counts), dtype=torch.int64)
    for batch in source.batches:
        for row, target_row in zip(batch.inputs.tolist(), batch.targets.tolist()):
            span = 0
            for token, target in zip(row, target_row):
                span = 0 if token == 5 else span + 1
                expected[span] += target != IGNORED_TARGET
    assert torch.equal(spans.counts, expected)


@pytest.mark.parametrize(("cutoffs", "temperature"), [(None, 1.0), (None, 1.3), ([], 1.0), ([4, 9], 1.3)])
def test_the_head_reads_only_where_targets_count_if_they_are_few(cutoffs, temperature):
    """With the same scores as if it read everything, from the same states."""
    torch.manual_seed(2)
    sizes = {"vocab_size": 13, "n_layer": 2, "d_model": 8, "d_channel_mixing": 8}
    if cutoffs is None:
        model = LanguageModel(LanguageModelConfig(mixer="gru", **sizes))
    else:
        model = TransformerXL(TransformerXLConfig(n_heads=2, segment_length=4, cutoffs=cutoffs, **sizes))
    tokens, targets = torch.randint(13, (2, 2, 24))
    few = targets.where(torch.arange(24) % 8 == 7, IGNORED_TARGET)
    few[:, 8:16] = IGNORED_TARGET  # a batch without targets
    read: list[int] = []
    model.head.register_forward_hook(lambda module, args, output: read.append(output.shape[:-1].numel()))

    def halves(targets):
        cut = zip(tokens.split(8, 1), targets.split(8, 1))
        return Batches(*(Batch(x, t, continues=number > 0) for number, (x, t) in enumerate(cut)))

    found = evaluate(model, halves(few), temperature=temperature)
    if cutoffs is None or temperature != 1.0:
        assert read == [2, 0, 2]
    logits = model.eval()(tokens)[0].detach()
    counted = few != IGNORED_TARGET
    losses = -log_softmax(logits[counted] / temperature, -1).gather(1, few[counted][:, None])
    assert found.n_targets == 4
    assert found.loss == pytest.approx(float(losses.mean()), abs=1e-5)
    if found.accuracy is not None:
        assert found.accuracy == float((logits[counted].argmax(-1) == few[counted]).double().mean())
    if cutoffs is None:
        observed = []
        whole = evaluate(model, halves(few), temperature=temperature, observe=lambda batch, p: observed.append(p.shape))
        assert observed == [(2, 8)] * 3
        assert whole.loss == pytest.approx(found.loss, abs=1e-6)


def test_overflow_is_infinite():
    # exp overflows just above 709.78
    assert math.isfinite(perplexity(709.0, 1))
    assert perplexity(710.0, 1) == perplexity(math.inf, 3) == math.inf


def test_without_a_target_there_is_no_perplexity():
    with pytest.raises(ValueError, match="n_tokens is 0; expected at least 1: the data must have a target"):
        perplexity(1.0, 0)


@pytest.mark.parametrize(("accuracy", "n_classes", "scaled"), [(0.2, 5, 0.0), (1.0, 5, 1.0), (0.75, 2, 0.5)])
def test_scaled_accuracy_is_0_at_chance(accuracy, n_classes, scaled):
    assert scaled_accuracy(accuracy, n_classes) == pytest.approx(scaled, abs=1e-12)


def test_positions_before_the_first_reset_and_from_it_on_are_counted_apart():
    around = AroundResets(reset_token=5)
    inputs = torch.tensor([[1, 2, 5, 3, 5], [5, 1, 1, 1, 1], [1, 2, 3, 4, 0]])
    targets = torch.tensor([[7, 7, 7, 7, 7], [7, 7, 7, 7, IGNORED_TARGET], [7, IGNORED_TARGET, 7, 7, 7]])
    predictions = torch.tensor([[7, 0, 7, 7, 0], [0, 7, 0, 0, IGNORED_TARGET], [7, IGNORED_TARGET, 7, 0, 7]])
    around(Batch(inputs, targets, continues=False), predictions)
    assert around.scores == {"accuracy_before_resets": 4 / 6, "accuracy_after_resets": 3 / 7}
    around(Batch(inputs[:1], targets[:1], continues=False), targets[:1])
    assert around.scores == {"accuracy_before_resets": 6 / 8, "accuracy_after_resets": 6 / 10}
