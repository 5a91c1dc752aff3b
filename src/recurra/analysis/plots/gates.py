"""GateLoop Figure 5: the magnitude of all transitions over time, and its means."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from torch import Tensor

from recurra.analysis.gates import GateRecord
from recurra.analysis.plots.figure import COLOURS, GREY, house_style, new_figure
from recurra.analysis.plots.heat_map import MAGNITUDE_COLOURS, heat_map, label_row, mark_steps


@house_style()
def gate_magnitudes(record: GateRecord, *, sequence: int = 0, reset_token: int | None = None) -> Figure:
    """Draw |a| of one sequence of a record.

    From top to bottom: a heat map per layer (channels by time), the mean over channels (layers by time), and the mean
    over channels and layers as a line. The channels of a layer are sorted by their mean, the largest on top: their own
    order means nothing, and sorting shows what share of them forgets. Triangles and dashed lines mark the steps whose
    input is the reset token.

    Args:
        record: the result of `recurra.analysis.record_gates`.
        sequence: the index of a sequence in the record's batch.
        reset_token: the token to mark; None marks nothing.

    Raises:
        IndexError: the record has no such sequence.
    """
    magnitudes = [magnitude[sequence] for magnitude in record.magnitudes]
    means = torch.stack([magnitude.mean(dim=1) for magnitude in magnitudes], dim=1)
    resets = [] if reset_token is None else record.at_token(reset_token)[sequence].nonzero().flatten().tolist()
    n_layers = len(magnitudes)
    heights = [max(0.35, min(0.9, 4.0 / n_layers))] * n_layers + [max(0.3, 0.13 * n_layers), 0.8]
    figure = new_figure(7.2, sum(heights) + 0.12 * len(heights) + 0.5)
    rows = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)

    for axes, magnitude, layer in zip(rows, magnitudes, record.layers):
        image = heat_map(axes, sorted_by_mean(magnitude), MAGNITUDE_COLOURS, (0.0, 1.0))
        label_row(axes, f"layer {layer}\n{magnitude.shape[1]} channels")
    _draw_means(rows[-2], rows[-1], means, record.layers, resets)
    for axes in rows[:-1]:
        mark_steps(axes, resets)
        axes.tick_params(bottom=False, length=2)
    bar = figure.colorbar(image, ax=list(rows[:-1]), label="magnitude $|a|$", aspect=40, pad=0.01)
    bar.outline.set_visible(False)
    return figure


def sorted_by_mean(
    values: Float[Tensor, "L channels"], key: Float[Tensor, "L channels"] | None = None
) -> Float[Tensor, "L channels"]:
    """Sort the channels by falling mean over time, of `key` if given, otherwise of `values`."""
    means = (values if key is None else key).mean(dim=0)
    return values[:, means.argsort(descending=True, stable=True)]


def _draw_means(
    by_layer: Axes, total: Axes, means: Float[Tensor, "L layers"], layers: Sequence[int], resets: list[int]
) -> ScalarMappable:
    """Draw the two means below the channels, and return the image for the colour bar."""
    image = heat_map(by_layer, means, MAGNITUDE_COLOURS, (0.0, 1.0))
    by_layer.set_yticks(range(len(layers)), [str(layer) for layer in layers], fontsize=7)
    label_row(by_layer, "mean\nby layer")
    _draw_total_mean(total, means.mean(dim=1), resets)
    return image


def _draw_total_mean(axes: Axes, mean: Float[Tensor, " L"], resets: list[int]) -> None:
    for step in resets:
        axes.axvline(step, color=GREY, linewidth=0.8, linestyle="--")
    axes.plot(mean.numpy(), color=COLOURS[0], linewidth=1.0, clip_on=False)  # a mean of 0 or 1 lies on the edge
    axes.set(xlabel="time step", ylim=(0, 1), yticks=[0, 0.5, 1], xlim=(-0.5, len(mean) - 0.5))
    label_row(axes, "mean\nover all")
