"""GateLoop Figure 4: the two activations of a transition's magnitude.

"Centred" means shifted along the horizontal axis so that the value at 0 is 1/2, as for the sigmoid:
exp(-exp(alpha + ln ln 2)) = 2^(-exp(alpha)). The shift does not change the slope at a given magnitude, and the slope
shows the bias towards magnitudes near 1 that the paper mentions. Close to 1 both functions flatten in the same way,
|d|a|/dalpha| ~ 1 - |a|, but close to 0 the sigmoid flattens like |a| and the stable exponential only like
|a| ln(1/|a|): a magnitude near 0 grows again sooner. The stable exponential is steepest at 1/e, not at 1/2.
"""

import math

import torch
from matplotlib.figure import Figure

from recurra.analysis.plots.figure import COLOURS, GREY, house_style, new_figure
from recurra.checks import require_positive

CENTRE = math.log(math.log(2.0))
"""The alpha at which exp(-exp(alpha)) is 1/2."""


@house_style()
def magnitude_activations(largest: float = 6.0) -> Figure:
    """Draw the sigmoid and LRU's stable exponential, centred, over [-largest, largest].

    Left: the functions. LRU's falls as alpha grows; its mirror image can be compared with the sigmoid. Right: the
    slope |d|a|/dalpha| of each against its magnitude.

    Raises:
        ValueError: `largest` is not a finite number above 0.
    """
    require_positive(largest=largest)
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
