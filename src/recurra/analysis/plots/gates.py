"""The transitions of a model as heat maps of channels by time (GateLoop, Figures 4, 5 and 8)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from torch import Tensor

from recurra.analysis.gates import GateRecord
from recurra.analysis.plots.figure import COLOURS, GREY, house_style, new_figure

_MAGNITUDE_COLOURS = "viridis"
_SHARP_STEPS, _SHARP_CHANNELS = 1500, 80
"""The numbers that get a pixel each in the smallest heat map of a saved PNG."""


def _heat_map(
    axes: Axes, values: Float[Tensor, "L channels"], colours: str, limits: tuple[float, float]
) -> ScalarMappable:
    """Fill the axes with values: time to the right, the first channel on top."""
    n_steps, n_channels = values.shape
    sharp = n_steps <= _SHARP_STEPS and n_channels <= _SHARP_CHANNELS
    image = axes.imshow(
        values.T.numpy(),
        aspect="auto",
        interpolation="none" if sharp else "antialiased",
        cmap=colours,
        vmin=limits[0],
        vmax=limits[1],
        extent=(-0.5, n_steps - 0.5, n_channels - 0.5, -0.5),
    )
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    return image


def _label_row(axes: Axes, text: str) -> None:
    axes.set_ylabel(text, rotation=0, horizontalalignment="right", verticalalignment="center")


def _mark_steps(axes: Axes, steps: Sequence[int]) -> None:
    """Put a triangle over each of the steps, just above the axes, where it hides no data."""
    if not steps:  # a line without points, drawn outside the axes, would break the layout
        return
    axes.plot(
        steps,
        [1.0] * len(steps),
        transform=axes.get_xaxis_transform(),
        linestyle="none",
        marker=7,  # a triangle pointing down, with its tip at the position
        color=GREY,
        clip_on=False,
    )


@house_style()
def gate_magnitudes(record: GateRecord, *, sequence: int = 0, reset_token: int | None = None) -> Figure:
    """Draw |a| of one sequence of a record.

    From top to bottom: a heat map per layer (channels by time), the mean over channels (layers by time), and the mean
    over both as a line. Channels are sorted by their mean, the largest on top. Triangles and dashed lines mark the
    steps whose input is `reset_token`.
    """
    magnitudes = [magnitude[sequence] for magnitude in record.magnitudes]
    means = torch.stack([magnitude.mean(dim=1) for magnitude in magnitudes], dim=1)
    resets = [] if reset_token is None else record.at_token(reset_token)[sequence].nonzero().flatten().tolist()
    n_layers = len(magnitudes)
    heights = [max(0.35, min(0.9, 4.0 / n_layers))] * n_layers + [max(0.3, 0.13 * n_layers), 0.8]
    figure = new_figure(7.2, sum(heights) + 0.12 * len(heights) + 0.5)
    rows = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)

    for axes, magnitude, layer in zip(rows, magnitudes, record.layers):
        image = _heat_map(axes, _sorted_by_mean(magnitude), _MAGNITUDE_COLOURS, (0.0, 1.0))
        _label_row(axes, f"layer {layer}\n{magnitude.shape[1]} channels")
    _heat_map(rows[-2], means, _MAGNITUDE_COLOURS, (0.0, 1.0))
    rows[-2].set_yticks(range(n_layers), [str(layer) for layer in record.layers], fontsize=7)
    _label_row(rows[-2], "mean\nby layer")
    for step in resets:
        rows[-1].axvline(step, color=GREY, linewidth=0.8, linestyle="--")
    mean = means.mean(dim=1)
    rows[-1].plot(mean.numpy(), color=COLOURS[0], linewidth=1.0, clip_on=False)  # a mean of 0 or 1 lies on the edge
    rows[-1].set(xlabel="time step", ylim=(0, 1), yticks=[0, 0.5, 1], xlim=(-0.5, len(mean) - 0.5))
    _label_row(rows[-1], "mean\nover all")
    for axes in rows[:-1]:
        _mark_steps(axes, resets)
        axes.tick_params(bottom=False, length=2)
    bar = figure.colorbar(image, ax=list(rows[:-1]), label="magnitude $|a|$", aspect=40, pad=0.01)
    bar.outline.set_visible(False)
    return figure


def _sorted_by_mean(
    values: Float[Tensor, "L channels"], key: Float[Tensor, "L channels"] | None = None
) -> Float[Tensor, "L channels"]:
    """Sort the channels by falling mean over time, of `key` if given, otherwise of `values`."""
    means = (values if key is None else key).mean(dim=0)
    return values[:, means.argsort(descending=True, stable=True)]


_PHASE_COLOURS = "twilight_shifted"
"""A cyclic map: its ends meet, like -pi and pi."""


@house_style()
def gate_phases(record: GateRecord, *, sequence: int = 0) -> Figure:
    """Draw |a| and the phase of one sequence of a record: two heat maps per layer.

    In both, the channels of a layer are sorted by their mean magnitude, the largest on top. Phases are wrapped to
    [-pi, pi).
    """
    n_layers = len(record.layers)
    height = max(0.5, min(1.5, 6.0 / n_layers))
    figure = new_figure(7.2, height * n_layers + 1.0)
    rows = figure.subplots(n_layers, 2, sharex=True, squeeze=False)
    for (left, right), layer, *recorded in zip(rows, record.layers, record.magnitudes, record.phases):
        magnitude, phase = (values[sequence] for values in recorded)
        magnitudes = _heat_map(left, _sorted_by_mean(magnitude), _MAGNITUDE_COLOURS, (0.0, 1.0))
        wrapped = torch.remainder(phase + math.pi, 2 * math.pi) - math.pi
        angles = _sorted_by_mean(wrapped, key=magnitude)
        phases = _heat_map(right, angles, _PHASE_COLOURS, (-math.pi, math.pi))
        _label_row(left, f"layer {layer}\n{magnitude.shape[1]} channels")
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


# "Centred" means shifted along the horizontal axis so that the value at 0 is 1/2, as for the sigmoid:
# exp(-exp(alpha + ln ln 2)) = 2^(-exp(alpha)). Close to 1 both functions flatten in the same way, but close to 0 the
# sigmoid flattens like |a| and the stable exponential only like |a| ln(1/|a|): a magnitude near 0 grows again sooner.


_CENTRE = math.log(math.log(2.0))
"""The alpha at which exp(-exp(alpha)) is 1/2."""


@house_style()
def magnitude_activations() -> Figure:
    """Draw the sigmoid and LRU's stable exponential, centred, over [-6, 6].

    Left: the functions. LRU's falls as alpha grows; its mirror image can be compared with the sigmoid. Right: the
    slope |d|a|/dalpha| of each against its magnitude.
    """
    figure = new_figure(7.2, 2.9)
    functions, speeds = figure.subplots(1, 2, width_ratios=[1.3, 1])

    alpha = torch.linspace(-6, 6, 801, dtype=torch.float64)
    stable = torch.exp(-torch.exp(alpha + _CENTRE))
    functions.plot(alpha, torch.sigmoid(alpha), color=COLOURS[0], label="sigmoid")
    functions.plot(alpha, stable, color=COLOURS[1], label="stable exponential,\ncentred")
    functions.plot(alpha, stable.flip(0), color=COLOURS[1], linestyle="--", label="its mirror image")
    functions.plot(0.0, 0.5, marker="o", color=GREY, markersize=3)
    functions.set(xlabel=r"pre-activation $\alpha$", ylabel="magnitude $|a|$", xlim=(-6, 6))
    functions.set_title("a  Activation")
    functions.legend(loc="center right", handlelength=1.5, borderpad=0)

    magnitude = torch.linspace(0, 1, 801, dtype=torch.float64)
    speeds.plot(magnitude, magnitude * (1 - magnitude), color=COLOURS[0], label="sigmoid")
    speeds.plot(magnitude, -torch.xlogy(magnitude, magnitude), color=COLOURS[1], label="stable exponential")
    speeds.set(xlabel="magnitude $|a|$", ylabel=r"$|\,\mathrm{d}|a|\,/\,\mathrm{d}\alpha\,|$", xlim=(0, 1))
    speeds.set_ylim(bottom=0)
    speeds.set_title("b  Speed at each magnitude")
    speeds.legend(loc="lower center", handlelength=1.5)
    return figure
