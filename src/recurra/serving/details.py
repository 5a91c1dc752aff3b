"""The transitions of a few tokens in the form that goes to a page: a byte for each |a| and each phase."""

import base64
import math
from typing import Any

import torch
from torch import Tensor

from recurra.analysis.gates import record_gates
from recurra.serving.served_model import ServedModel


def gates_of(model: ServedModel, tokens: list[int], state: Any, channels: int) -> list[dict[str, Any]]:
    """Give the transitions with which a model reads tokens, one entry for each.

    An entry has `layers`, and `magnitudes` and `phases`, one text for each layer: base64 of a byte for each of at most
    `channels` evenly spaced channels. |a| is byte / 255; the phase is byte / 256 of a turn, from 0.

    Args:
        model: one that has transitions.
        tokens: what it reads.
        state: the state before the first of them.
        channels: of each layer, at most.
    """
    record = record_gates(model.plain, torch.tensor([tokens]), state)
    told = [number for number, layer in enumerate(record.layers) if layer in model.gate_layers]
    magnitudes = [_bytes((255 * record.magnitudes[number][0]).round().clamp(0, 255), channels) for number in told]
    phases = [_bytes((256 * record.phases[number][0] / (2 * math.pi)).round() % 256, channels) for number in told]
    return [
        {
            "layers": [record.layers[number] for number in told],
            "magnitudes": [part[step] for part in magnitudes],
            "phases": [part[step] for part in phases],
        }
        for step in range(len(tokens))
    ]


def _bytes(values: Tensor, channels: int) -> list[str]:
    """Evenly spaced channels of (L, channels), as base64 for each step."""
    width = values.shape[-1]
    chosen = torch.linspace(0, width - 1, min(width, channels)).round().long()
    return [base64.b64encode(bytes(row)).decode() for row in values[:, chosen].to(torch.uint8).tolist()]
