"""S5-Hyena: Hyena's gated recurrence with a state space model as its long convolution (Smith et al. 2023, arXiv
2208.04933; Hyena: Poli et al. 2023, arXiv 2302.10866; GateLoop Table 1 compares with it).
"""

from typing import NamedTuple

from jaxtyping import Complex, Float
from torch import Tensor, nn

from recurra.layers.convolution import ShortConvolution
from recurra.layers.state_space import DenseModes, require_pairs
from recurra.mixers.base import Mixer, StateSpec, register_mixer


class S5HyenaState(NamedTuple):
    """What both recurrences carry.

    inputs: the last inputs of the short convolutions, the oldest first.
    h: the kept modes.
    """

    inputs: Float[Tensor, "B K_1 D3"]
    h: Complex[Tensor, "B n"]


@register_mixer("s5-hyena")
class S5Hyena(DenseModes, Mixer):
    """y = W_o (x_1 * SSM(x_2 * v)), with x_1, x_2, v = short convolutions of linear projections of x.

    This is Hyena of order 2 with S5's SSM over all channels, with a skip and without activation and gate, in the place
    of the implicit filter. The state is of constant size, where Hyena's is a window.

    Args:
        d_state: modes, an even number.
        kernel_size: steps of the short convolutions.
        min_step, max_step: the step sizes at the start are spaced logarithmically between these, one per kept mode.
    """

    skips_padding = True

    def __init__(
        self, d_model: int, *, d_state: int = 64, kernel_size: int = 3, min_step: float = 0.001, max_step: float = 0.1
    ) -> None:
        require_pairs(d_state)
        short_convolution = ShortConvolution(3 * d_model, kernel_size)
        inputs, h = StateSpec((kernel_size - 1, 3 * d_model)), StateSpec((d_state // 2,), is_complex=True)
        super().__init__(d_model, S5HyenaState, inputs=inputs, h=h)
        self.input_projection = nn.Linear(d_model, 3 * d_model)
        self.short_convolution = short_convolution
        self.make_modes(d_model, d_state=d_state, min_step=min_step, max_step=max_step)
        self.output_projection = nn.Linear(d_model, d_model)

    def mix(self, x: Tensor, state: S5HyenaState, mask: Tensor | None) -> tuple[Tensor, S5HyenaState]:
        projected, inputs = self.short_convolution(self.input_projection(x), state.inputs, mask)
        x_1, x_2, v = projected.chunk(3, -1)
        u, h = self.run_modes(x_2 * v, state.h, mask)
        return self.output_projection((x_1 * u).to(x.dtype)), S5HyenaState(inputs, h)
