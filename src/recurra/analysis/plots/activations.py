"""Figure 4 of GateLoop: the two functions that make the magnitude of a gate.

"Centred" means moved along the horizontal axis until the value at 0 is 1/2, as it is for the sigmoid:
exp(-exp(alpha + ln ln 2)) = 2^(-exp(alpha)). The move does not change how fast the gate moves at a given
magnitude, and that is where the bias towards magnitudes near 1, of which the paper speaks, can be seen:
close to 1 both functions slow down alike, |d|a|/dalpha| ~ 1 - |a|, but close to 0 the sigmoid slows down
as |a| does and the stable exponential only as |a| ln(1/|a|). A gate near 0 leaves it sooner. Its speed is
greatest at 1/e, not at 1/2.
"""

import math

import torch
from matplotlib.figure import Figure

from recurra.analysis.plots.figure import COLOURS, GREY, house_style, new_figure

CENTRE = math.log(math.log(2.0))
"""Where exp(-exp(alpha)) is 1/2."""


@house_style()
def magnitude_activations(largest: float = 6.0) -> Figure:
    """Draw the sigmoid against the centred stable exponential of LRU over [-largest, largest].

    Left: the functions. LRU's falls as alpha grows; its mirror image beside it can be compared with the
    sigmoid. Right: how fast each moves, |d|a|/dalpha|, against the magnitude that it has there.

    Raises:
        ValueError: largest is not a positive number.
    """
    if not 0 < largest < math.inf:
        raise ValueError(f"largest must be a positive number, got {largest}")
    figure = new_figure(7.2, 2.9)
    functions, speeds = figure.subplots(1, 2, width_ratios=[1.3, 1])

    alpha = torch.linspace(-largest, largest, 801, dtype=torch.float64)
    stable = torch.exp(-torch.exp(alpha + CENTRE))
    functions.plot(alpha, torch.sigmoid(alpha), color=COLOURS[0], label="sigmoid")
    functions.plot(alpha, stable, color=COLOURS[1], label="stable exponential,\ncentred")
    functions.plot(alpha, stable.flip(0), color=COLOURS[1], linestyle="--", label="its mirror image")
    functions.plot(0.0, 0.5, marker="o", color=GREY, markersize=3)
    functions.set(xlabel=r"pre-activation $\alpha$", ylabel="magnitude $|a|$", xlim=(-largest, largest))
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
