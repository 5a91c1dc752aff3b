"""S4D: a diagonal state space model per channel (Gu et al. 2022, "On the Parameterization and Initialization of
Diagonal State Space Models", arXiv 2206.11893; GateLoop section 2.2).
"""

from typing import NamedTuple

from jaxtyping import Complex
from torch import Tensor, nn
from torch.nn import functional

from recurra.layers.norms import at_least_float32
from recurra.layers.state_space import ChannelModes, require_pairs, run_channels
from recurra.mixers.base import Mixer, StateSpec, register_mixer


class S4DState(NamedTuple):
    """The kept modes of every channel."""

    h: Complex[Tensor, "B D n"]


@register_mixer("s4d")
class S4D(ChannelModes, Mixer):
    """y = GLU(W GELU(SSM(x) + skip x)), with an SSM of `d_state` modes in conjugate pairs for every channel.

        h_t = a h_{t-1} + b x_t,  SSM(x)_t = 2 Re sum_n C_n h_t,n,  lambda = -exp(log_decay) + i frequency

    `recurra.layers.state_space` defines the modes and their initialisation. The output is that of the published block.
    Whole sequences are convolved; short pieces run step by step.

    Args:
        d_state: modes per channel, an even number (the papers' N).
        init: initial frequencies, "lin" (S4D-Lin) or "inv" (S4D-Inv).
        discretisation: "zoh" (zero-order hold) or "bilinear".
        min_step, max_step: initial step sizes are spaced logarithmically between these, one per channel.
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
        super().__init__(d_model, S4DState, h=StateSpec((d_model, d_state // 2), is_complex=True))
        self.make_modes(
            d_model,
            d_state=d_state,
            init=init,
            discretisation=discretisation,
            min_step=min_step,
            max_step=max_step,
        )
        self.output_projection = nn.Linear(d_model, 2 * d_model)

    def mix(self, x: Tensor, state: S4DState | None, mask: None) -> tuple[Tensor, S4DState]:
        y, h = run_channels(at_least_float32(x), self.ssm(), None if state is None else state.h)
        y = functional.gelu(y + self.skip * x)
        return functional.glu(self.output_projection(y.to(x.dtype)), -1), S4DState(h)
