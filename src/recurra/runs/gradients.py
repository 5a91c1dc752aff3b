"""How gradients pass between the segments of a trained Compact Recurrent Transformer."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from recurra.analysis import GradientFlow, measure_gradient_flow
from recurra.analysis.jacobians import Track, untracked
from recurra.analysis.memory_trace import memory_rnn
from recurra.checks import require_at_least, sentence
from recurra.data import Split
from recurra.files.writing import replacing
from recurra.models import CompactRecurrentTransformer, CompactRecurrentTransformerState
from recurra.runs.run import Run


def measured_tokens(run: Run, split: Split = "test", *, segments: int = 3, warm_up: int = 4) -> Tensor:
    """Read the tokens to measure on, (1, L), from the start of a split.

    Args:
        run: a text run of a Compact Recurrent Transformer.
        split: where the text is from.
        segments: segments to measure, at least 2.
        warm_up: segments to read before them, so that the memory is no longer zeros.

    Raises:
        ValueError: the run's model has no memory vector, a number is too small, or the split is too short.
    """
    try:
        memory_rnn(run.model)
    except ValueError as error:
        raise ValueError(f"run {run.name}: {error}") from error
    require_at_least(2, segments=segments)
    require_at_least(0, warm_up=warm_up)
    assert isinstance(run.model, CompactRecurrentTransformer)
    n_tokens = (warm_up + segments) * run.model.config.segment_length
    data: Any = run.data
    tokens = data.tokens(split)
    if len(tokens) < n_tokens:
        expected = f"at least {n_tokens} for {warm_up} + {segments} segments"
        came = f"{len(tokens)} tokens long"
        raise ValueError(sentence(f"split {split} of run {run.name}", came, expected, "lower segments or warm_up"))
    return torch.from_numpy(tokens[:n_tokens].astype("int64"))[None]


def measure_gradients(run: Run, tokens: Tensor, *, warm_up: int = 4, track: Track = untracked) -> GradientFlow:
    """Measure ||dy_k/dy_i|| between the segments of `tokens`, and its bounds.

    Args:
        run: a text run of a Compact Recurrent Transformer.
        tokens: what `measured_tokens` gave, with the same `warm_up`.
        warm_up: segments to read before the measured ones.
        track: shows progress.
    """
    model = run.model
    assert isinstance(model, CompactRecurrentTransformer)
    border = warm_up * model.config.segment_length
    with torch.no_grad():
        state = cast(CompactRecurrentTransformerState, model.hidden(tokens[:, :border])[1]) if warm_up else None
    return measure_gradient_flow(model, tokens[:, border:], state, track=track)


def write_gradients(run: Run, options: Mapping[str, Any], flow: GradientFlow) -> Path:
    """Write RUN/gradients.json: the options, and every measured number with the positions it belongs to."""
    path = run.folder.path / "gradients.json"
    with replacing(path) as file:
        file.write((json.dumps({**options, **_plain(asdict(flow))}, indent=2) + "\n").encode())
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value.tolist() if isinstance(value, Tensor) else value
