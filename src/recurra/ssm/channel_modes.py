"""The parameters of one diagonal state space model a channel, as S4D has them (Gu et al. 2022, arXiv 2206.11893)."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import choose
from recurra.layers.precision import at_least_float32
from recurra.ssm.diagonal import (
    DISCRETISATIONS,
    ChannelSSM,
    decaying_eigenvalues,
    fixed_transition,
    log_spaced_steps,
    require_pairs,
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


class ChannelModes(nn.Module):
    """A base of mixers that have `d_state` modes in conjugate pairs for every channel, as parameters of their own.

        lambda = -exp(log_decay) + i frequency,  a and b from lambda and exp(log_step),  c = 2 C

    One mode of each pair is kept. B is 1: its product with C is all that matters. Real parts start at -1/2, C is drawn
    from the complex normal distribution of variance 1 and the skip from N(0, 1).
    """

    def make_modes(
        self, n_channels: int, *, d_state: int, init: str, discretisation: str, min_step: float, max_step: float
    ) -> None:
        """Draw the parameters; the options are those of `recurra.mixers.S4D`.

        Raises:
            ValueError: an option has a value that does not exist, or a size is out of range.
        """
        require_pairs(d_state)
        frequency = choose("init", FREQUENCIES, init)(d_state)
        self.discretise = choose("discretisation", DISCRETISATIONS, discretisation)
        self.log_step = nn.Parameter(log_spaced_steps(n_channels, min_step, max_step))
        self.log_decay = nn.Parameter(torch.full((n_channels, d_state // 2), math.log(0.5)))
        self.frequency = nn.Parameter(frequency.repeat(n_channels, 1))
        self.output_weights = nn.Parameter(torch.randn(n_channels, d_state // 2, 2) * 0.5**0.5)  # C: real, imaginary
        self.skip = nn.Parameter(torch.randn(n_channels))

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
