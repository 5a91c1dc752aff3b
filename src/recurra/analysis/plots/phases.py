"""GateLoop Figure 8: magnitude and phase of the transitions side by side, layer by layer."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from recurra.analysis.gates import GateRecord
from recurra.analysis.plots.figure import house_style, new_figure
from recurra.analysis.plots.gates import sorted_by_mean
from recurra.analysis.plots.heat_map import MAGNITUDE_COLOURS, heat_map, label_row
from recurra.checks import require

PHASE_COLOURS = "twilight_shifted"
"""A cyclic map: its ends meet, like -pi and pi."""


@house_style()
def gate_phases(record: GateRecord, *, sequence: int = 0, layers: Sequence[int] | None = None) -> Figure:
    """Draw |a| and the phase of one sequence of a record: two heat maps per layer.

    In both, the channels of a layer are sorted by their mean magnitude, the largest on top. Phases are wrapped to
    [-pi, pi), because only the angle acts on the state.

    Args:
        record: the result of `recurra.analysis.record_gates`.
        sequence: the index of a sequence in the record's batch.
        layers: the layers of the record to draw (the paper draws 0 and 8); None draws all of them.

    Raises:
        ValueError: the record has no such layer, or `layers` is empty.
        IndexError: the record has no such sequence.
    """
    chosen = record.layers if layers is None else tuple(layers)
    known = bool(chosen) and set(chosen) <= set(record.layers)
    require(known, "layers", chosen, f"one or more of the record's layers {record.layers}")
    height = max(0.5, min(1.5, 6.0 / len(chosen)))
    figure = new_figure(7.2, height * len(chosen) + 1.0)
    rows = figure.subplots(len(chosen), 2, sharex=True, squeeze=False)
    for (left, right), layer in zip(rows, chosen):
        index = record.layers.index(layer)
        magnitude, phase = record.magnitudes[index][sequence], record.phases[index][sequence]
        magnitudes = heat_map(left, sorted_by_mean(magnitude), MAGNITUDE_COLOURS, (0.0, 1.0))
        angles = sorted_by_mean(wrapped(phase), key=magnitude)
        phases = heat_map(right, angles, PHASE_COLOURS, (-math.pi, math.pi))
        label_row(left, f"layer {layer}\n{magnitude.shape[1]} channels")
    for axes in rows[:-1].flat:
        axes.tick_params(bottom=False)
    for axes in rows[-1]:
        axes.set_xlabel("time step")
    place: dict[str, Any] = {"location": "top", "aspect": 40, "shrink": 0.9, "pad": 0.02}
    bars = (
        figure.colorbar(magnitudes, ax=list(rows[:, 0]), label="magnitude $|a|$", **place),
        figure.colorbar(phases, ax=list(rows[:, 1]), label=r"phase $\arg a$", **place),
    )
    bars[1].set_ticks([-math.pi, 0, math.pi], labels=[r"$-\pi$", "0", r"$\pi$"])
    for bar in bars:
        bar.outline.set_visible(False)
    return figure


def wrapped(phase: Float[Tensor, "L channels"]) -> Float[Tensor, "L channels"]:
    """Wrap angles to [-pi, pi)."""
    return torch.remainder(phase + math.pi, 2 * math.pi) - math.pi
