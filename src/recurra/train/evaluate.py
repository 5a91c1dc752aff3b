"""Evaluation of a model on a whole split: losses, perplexity, and accuracy overall and by memory span."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor, nn

from recurra._choices import TEMPERATURES
from recurra.checks import kind_of, require, require_positive, sentence
from recurra.data.batches import IGNORED_TARGET, Batch, BatchSource
from recurra.data.memory_horizon import SpanAccuracy
from recurra.layers.embeddings import few_targets
from recurra.models.shell import LanguageModelShell, evaluation_mode, negative_log_likelihood
from recurra.ops._toolkit.graphs import Capture, GraphedFunction


def perplexity(total_negative_log_likelihood: float, n_tokens: int) -> float:
    """Return exp(total / n_tokens): the number of equally likely tokens that would be as hard to predict.

    `total_negative_log_likelihood` is the sum over all tokens, in nats. Infinity if the result overflows a float.
    """
    require(n_tokens >= 1, "n_tokens", n_tokens, "at least 1", "the data must have a target that is not ignored")
    try:
        return math.exp(total_negative_log_likelihood / n_tokens)
    except OverflowError:
        return math.inf


def scaled_accuracy(accuracy: float, n_classes: int) -> float:
    """Return the accuracy with chance, one of `n_classes`, as 0 and no mistake as 1: as state tracking is reported."""
    chance = 1.0 / n_classes
    return (accuracy - chance) / (1.0 - chance)


def _accuracy_by_span(correct: Bool[Tensor, " n"], spans: Integer[Tensor, " n"]) -> SpanAccuracy:
    """Count correct positions by memory span: how many tokens the target at a position depends on."""
    counts = torch.bincount(spans)
    n_correct = torch.bincount(spans[correct], minlength=len(counts))
    return SpanAccuracy(n_correct.cpu(), counts.cpu())


class AroundResets:
    """An observer that counts correct predictions before the first reset of each sequence, and from it on.

    Until then, a model only has to remember. What it scores below that afterwards, it fails to forget (GateLoop, 5.1).
    """

    def __init__(self, reset_token: int) -> None:
        self._reset_token = reset_token
        self._n_correct, self._counts = [0, 0], [0, 0]  # before, after

    def __call__(self, batch: Batch, predictions: Int[Tensor, "B L"]) -> None:
        """Count a batch of whole sequences."""
        after = (batch.inputs == self._reset_token).cumsum(1) > 0
        counted = batch.targets != IGNORED_TARGET
        for part, chosen in enumerate((counted & ~after, counted & after)):
            self._n_correct[part] += int((predictions == batch.targets)[chosen].sum())
            self._counts[part] += int(chosen.sum())

    @property
    def scores(self) -> dict[str, float]:
        """The shares of correct predictions, of those parts that have any positions."""
        names = ("accuracy_before_resets", "accuracy_after_resets")
        parts = zip(names, self._n_correct, self._counts)
        return {name: n_correct / count for name, n_correct, count in parts if count}


class EvaluationResult(NamedTuple):
    """The scores of a model on a split.

    loss: mean negative log-likelihood in nats per target.
    perplexity: exp(loss).
    bits_per_token: loss / ln 2.
    accuracy: the share of targets that were the likeliest prediction; None if the model computes its loss without the
        logits of all classes (an adaptive softmax over a large vocabulary).
    n_targets: the number of targets, without ignored ones.
    seconds: the time it took.
    tokens_per_second: input tokens (for video, frames) read per second.
    """

    loss: float
    perplexity: float
    bits_per_token: float
    accuracy: float | None
    n_targets: int
    seconds: float
    tokens_per_second: float


def evaluate(
    model: nn.Module,
    source: BatchSource,
    *,
    observe: Callable[[Batch, Tensor], None] | None = None,
    temperature: float = 1.0,
    total: Callable[..., list[float]] | None = None,
    capture: Capture | None = None,
) -> EvaluationResult:
    """Run a model over one epoch of a source, in the precision of its weights and without gradients.

    A batch that continues the previous one starts from its state. The model runs in evaluation mode and returns to its
    own mode afterwards.

    Args:
        model: called as `model(tokens, state) -> (logits, state)`, logits (B, L, classes), if it `forms_logits` or has
            no `loss`; otherwise as `model.loss(tokens, targets, state) -> (losses, state)`, losses (B, L) in nats.
        source: the batches; positions whose target is `IGNORED_TARGET` are skipped.
        observe: called with every batch and the likeliest prediction at each position, (B, L) int64 on the CPU.
        temperature: logits are divided by it. Above 1 it mends a model that is too sure of itself.
        total: for ranks that each read a part of the batches: adds up numbers over them. The scores are then those of
            all parts, on every rank.
        capture: replays batches of the same shapes, but for the head and the losses, as CUDA graphs, which last as long
            as this call. If that cannot be, one warning says why.
    """
    require_positive(temperature=temperature)
    by_logits = getattr(model, "forms_logits", not hasattr(model, "loss")) or temperature != 1.0
    if observe is not None and not by_logits:
        got = f"{kind_of(observe)}, with a {type(model).__name__}"
        raise ValueError(sentence("observe", got, "None", "this model computes its loss without predictions"))
    device = next(model.parameters()).device
    # In float64: a float32 sum over a long text would lose the digits that perplexities are compared by.
    summed = torch.zeros((), dtype=torch.float64, device=device)
    n_correct = torch.zeros((), dtype=torch.int64, device=device)
    n_targets = n_tokens = 0
    start = perf_counter()
    with _scoring(model):
        everywhere = observe is not None
        for batch, targets, output in _outputs(model, source, logits=by_logits, everywhere=everywhere, capture=capture):
            if by_logits:
                predictions = output.argmax(dim=-1)
                n_correct += (predictions == targets).sum()
                if observe is not None:
                    observe(batch, predictions.cpu())
            losses = negative_log_likelihood(output / temperature, targets) if by_logits else output
            summed += losses.sum(dtype=torch.float64)
            n_targets += int((batch.targets != IGNORED_TARGET).sum())
            n_tokens += batch.n_steps
    nats, correct = float(summed), int(n_correct)  # waits for the device, so that the time below includes all its work
    if total is not None:
        nats, *counts = total(nats, correct, n_targets, n_tokens)
        correct, n_targets, n_tokens = map(int, counts)
    seconds = perf_counter() - start
    return EvaluationResult(
        loss=nats / max(1, n_targets),
        perplexity=perplexity(nats, n_targets),
        bits_per_token=nats / n_targets / math.log(2.0),
        accuracy=correct / n_targets if by_logits else None,
        n_targets=n_targets,
        seconds=seconds,
        tokens_per_second=n_tokens / seconds,
    )


def best_temperature(model: nn.Module, source: BatchSource) -> float:
    """Find the temperature of `TEMPERATURES`, 0.3 to 8, with the lowest loss over a source, which is read once.

    If it is the first or the last of them, a better one may lie beyond.

    Args:
        model: called as `model(tokens, state) -> (logits, state)`, logits (B, L, classes).
        source: as for `evaluate`; a validation split, for a temperature chosen on the split that it scores flatters.
    """
    device = next(model.parameters()).device
    totals = torch.zeros(len(TEMPERATURES), dtype=torch.float64, device=device)
    with _scoring(model):
        for _, targets, logits in _outputs(model, source, logits=True):
            counted = targets != IGNORED_TARGET
            logits, targets = logits[counted][None], targets[counted][None]
            for number, temperature in enumerate(TEMPERATURES):
                totals[number] += negative_log_likelihood(logits / temperature, targets).sum(dtype=torch.float64)
    return TEMPERATURES[int(totals.argmin())]


def evaluate_by_span(
    model: nn.Module, source: BatchSource, spans: Callable[[Tensor], Tensor]
) -> tuple[EvaluationResult, SpanAccuracy]:
    """Evaluate, and count correct predictions by memory span: how far back the target depends on the input.

    spans: from inputs (B, L) to the memory span of each position, (B, L) integers, as `memory_spans`.
    """
    correct: list[Tensor] = []
    reach: list[Tensor] = []

    def keep(batch: Batch, predictions: Tensor) -> None:
        counted = batch.targets != IGNORED_TARGET
        correct.append((predictions == batch.targets)[counted])
        reach.append(spans(batch.inputs)[counted])

    result = evaluate(model, source, observe=keep)
    return result, _accuracy_by_span(torch.cat(correct), torch.cat(reach))


def _outputs(
    model: nn.Module,
    source: BatchSource,
    *,
    logits: bool,
    everywhere: bool = False,
    capture: Capture | None = None,
) -> Iterator[tuple[Batch, Tensor, Tensor]]:
    """Run a model over one epoch: each batch, its targets on the model's device, and the logits or else the losses."""
    device = next(model.parameters()).device
    shell = model if isinstance(model, LanguageModelShell) else None
    call = shell.hidden if shell is not None else model if logits else cast(Any, model).loss
    # captured anew in each evaluation: what a module derives from its weights and keeps lies elsewhere after an update
    call, state = GraphedFunction(call, capture, refuse=_refuse_graphs), None
    for step in range(len(source)):
        batch = source.batch(0, step)
        inputs, targets = batch.inputs.to(device), batch.targets.to(device)
        carried = state if batch.continues else None
        extra: dict[str, Any] = {} if batch.cu_seqlens is None else {"cu_seqlens": batch.cu_seqlens}
        if shell is not None:
            hidden, state = call(inputs, carried, **extra)
            counted = batch.targets != IGNORED_TARGET
            if not everywhere and few_targets(int(counted.sum()), targets):
                counted = counted.to(device)
                hidden, targets = hidden[counted][None], targets[counted][None]
            output = shell.head(hidden) if logits else shell.losses(hidden, targets)
        else:
            output, state = call(*((inputs, carried) if logits else (inputs, targets, carried)), **extra)
        yield batch, targets, output


def _refuse_graphs(why: str) -> None:
    warnings.warn(f"evaluated without CUDA graphs: {why}", stacklevel=4)


@contextmanager
def _scoring(model: nn.Module) -> Iterator[None]:
    """Evaluation mode in the precision of the weights, without gradients."""
    kind = next(model.parameters()).device.type
    with evaluation_mode(model), torch.inference_mode(), torch.autocast(kind, enabled=False):
        yield
