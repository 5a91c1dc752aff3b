"""S4D: a diagonal state space model per channel (Gu et al. 2022, "On the Parameterization and Initialization of
Diagonal State Space Models", arXiv 2206.11893; GateLoop section 2.2)."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import choose
from recurra.layers.precision import at_least_float32
from recurra.mixers.base import Carried, Mixer
from recurra.mixers.registry import register_mixer
from recurra.ssm.diagonal import (
    DISCRETISATIONS,
    ChannelSSM,
    decaying_eigenvalues,
    fixed_transition,
    log_spaced_steps,
    require_pairs,
    run_channels,
)


def linear_frequencies(d_state: int) -> Float[Tensor, " n"]:
    """S4D-Lin: pi k for the kept modes k = 0 ... d_state / 2 - 1 (GateLoop section 2.2)."""
    return math.pi * torch.arange(d_state // 2)


def inverse_frequencies(d_state: int) -> Float[Tensor, " n"]:
    """S4D-Inv: (N / pi) (N / (2 k + 1) - 1) with N = d_state, close to the frequencies of HiPPO-LegS.

    GateLoop section 2.2 prints (l / pi) (l / (k + 1) + 1). The S4D paper's formula (Gu et al. (9)), its authors' code
    and the spectrum of HiPPO-LegS agree with each other and not with the print, so we use them.
    """
    k = torch.arange(d_state // 2)
    return d_state / math.pi * (d_state / (2 * k + 1) - 1)


FREQUENCIES: dict[str, Callable[[int], Tensor]] = {"lin": linear_frequencies, "inv": inverse_frequencies}


class S4DState(NamedTuple):
    """The kept modes of every channel, complex64 whatever the precision of the input (complex128 for float64)."""

    h: Complex[Tensor, "B D n"]


@register_mixer("s4d")
class S4D(Mixer):
    """y = GLU(W GELU(SSM(x) + skip x)), with an SSM of `d_state` modes in conjugate pairs for every channel.

        h_t = a h_{t-1} + b x_t,  SSM(x)_t = 2 Re sum_n C_n h_t,n,  lambda = -exp(log_decay) + i frequency

    One mode of each pair is kept. B is 1: its product with C is all that matters. Real parts start at -1/2, C is drawn
    from the complex normal distribution of variance 1 and the skip from N(0, 1); GELU, then a linear map to twice the
    channels and a gated linear unit, are those of the published block (its dropout and normalisation belong to
    `recurra.models.Block`). Whole sequences are convolved, short pieces step: see `recurra.ssm.diagonal`.

    Args:
        d_model: channels of x and y.
        d_state: modes per channel, an even number (the papers' N).
        init: the frequencies at the start, "lin" (S4D-Lin) or "inv" (S4D-Inv).
        discretisation: "zoh" (zero-order hold) or "bilinear".
        min_step, max_step: the step sizes at the start are spaced logarithmically between these, one per channel.

    Raises:
        ValueError: an option has a value that does not exist, or a size is out of range.
    """

    starts_from_none = True  # the convolution then has no state to add

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 64,
        init: str = "lin",
        discretisation: str = "zoh",
        min_step: float = 0.001,
        max_step: float = 0.1,
    ) -> None:
        require_pairs(d_state)
        super().__init__(d_model, S4DState, h=Carried((d_model, d_state // 2), is_complex=True))
        frequency = choose("init", FREQUENCIES, init)(d_state)
        self.discretise = choose("discretisation", DISCRETISATIONS, discretisation)
        self.log_step = nn.Parameter(log_spaced_steps(d_model, min_step, max_step))
        self.log_decay = nn.Parameter(torch.full((d_model, d_state // 2), math.log(0.5)))
        self.frequency = nn.Parameter(frequency.repeat(d_model, 1))
        self.output_weights = nn.Parameter(torch.randn(d_model, d_state // 2, 2) * 0.5**0.5)  # C: real, imaginary
        self.skip = nn.Parameter(torch.randn(d_model))
        self.output_projection = nn.Linear(d_model, 2 * d_model)

    def transition_parameters(self) -> set[nn.Parameter]:
        """Step sizes and eigenvalues, which make a: they may want their own learning rate and no weight decay."""
        return {self.log_step, self.log_decay, self.frequency}

    def transition(self, x: Float[Tensor, "B L d_model"]) -> tuple[Float[Tensor, "B L _"], Float[Tensor, "B L _"]]:
        """Return |a| and its phase in radians for every kept mode of every channel, the same at every step."""
        return fixed_transition(self.ssm().a, x)

    def ssm(self) -> ChannelSSM:
        """Discretise the model of every channel."""
        step = torch.exp(at_least_float32(self.log_step))[:, None]
        a, factor = self.discretise(decaying_eigenvalues(self.log_decay, self.frequency), step)
        return ChannelSSM(a, factor, 2 * torch.view_as_complex(at_least_float32(self.output_weights)))

    def mix(
        self, x: Float[Tensor, "B L d_model"], state: S4DState | None, mask: None
    ) -> tuple[Float[Tensor, "B L d_model"], S4DState]:
        """Convolve long sequences, step through short ones."""
        y, h = run_channels(at_least_float32(x), self.ssm(), None if state is None else state.h)
        y = functional.gelu(y + self.skip * x)
        return functional.glu(self.output_projection(y.to(x.dtype)), -1), S4DState(h)
