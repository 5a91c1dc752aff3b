"""The gated short convolution of LFM2 (Amini et al. 2025, "LFM2 Technical Report", arXiv 2511.23404)."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import require_at_least
from recurra.layers.convolution import ShortConvolution
from recurra.mixers.base import Mixer, StateSpec, register_mixer


class GatedShortConvolutionState(NamedTuple):
    """The last K - 1 gated inputs of the convolution, the oldest first."""

    inputs: Float[Tensor, "B K_1 D"]


@register_mixer("short-conv")
class GatedShortConvolution(Mixer):
    """y_t = W_o (C_t * convolution(B * u)_t), with B, C, u = linear projections of x: a gate on each side.

    The convolution is a causal filter of K steps per channel, without an activation. A step sees only K steps, so
    models combine this layer with attention, which sees the others.

    Args:
        kernel_size: K, the steps that the convolution sees, the newest included.
        biases: whether the projections and the convolution have biases.
    """

    skips_padding = True

    def __init__(self, d_model: int, *, kernel_size: int = 3, biases: bool = False) -> None:
        require_at_least(1, d_model=d_model, kernel_size=kernel_size)
        super().__init__(d_model, GatedShortConvolutionState, inputs=StateSpec((kernel_size - 1, d_model)))
        self.input_projection = nn.Linear(d_model, 3 * d_model, bias=biases)
        self.convolution = ShortConvolution(d_model, kernel_size, bias=biases)
        self.output_projection = nn.Linear(d_model, d_model, bias=biases)

    def mix(
        self, x: Tensor, state: GatedShortConvolutionState, mask: Tensor | None
    ) -> tuple[Tensor, GatedShortConvolutionState]:
        b, c, u = self.input_projection(x).chunk(3, -1)
        y, inputs = self.convolution(b * u, state.inputs, mask)
        return self.output_projection(c * y), GatedShortConvolutionState(inputs)
