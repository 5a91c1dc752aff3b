"""Hyena: alternating gates and long convolutions with implicit filters (Poli et al. 2023, arXiv 2302.10866)."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import require_at_least
from recurra.layers.convolution import ImplicitFilters, ShortConvolution, convolve_window
from recurra.layers.norms import at_least_float32
from recurra.mixers.base import Mixer, StateSpec, register_mixer


class HyenaState(NamedTuple):
    """The past inputs that the convolutions still need, zeros before the stream.

    inputs: the last inputs of the short convolutions, the oldest first.
    products: the last window - 1 inputs of each long convolution, x_n * z_n, the oldest first.
    """

    inputs: Float[Tensor, "B K_1 channels"]
    products: Float[Tensor, "B convolutions W_1 D"]


@register_mixer("hyena")
class Hyena(Mixer):
    """z_1 = v, z_n+1 = h_n * (x_n z_n) for n < order, y = W_o (x_order z_order); h * is a convolution (section 3.1;
    GateLoop section 3.1).

    x_1 ... x_order and v are short convolutions of linear projections of x, the filters h_n are implicit
    (`recurra.layers.convolution`), and each convolution has a skip. As in the published code, `order` gates have
    order - 1 long convolutions between them.

    The published filters are as long as the training sequences. Here they have `window` steps, so the state, which
    contains the inputs that filters still reach, is bounded. Gradients flow through it. Each call computes the filters;
    long pieces are convolved by fast Fourier transform, short ones directly.

    Args:
        order: number of gates, at least 2.
        window: steps of a long filter.
        kernel_size: steps of the short convolutions.
    """

    def __init__(self, d_model: int, *, order: int = 2, window: int = 128, kernel_size: int = 3) -> None:
        require_at_least(1, d_model=d_model, window=window)
        require_at_least(2, order=order)
        short_convolution = ShortConvolution((order + 1) * d_model, kernel_size)
        inputs, products = (kernel_size - 1, (order + 1) * d_model), (order - 1, window - 1, d_model)
        super().__init__(d_model, HyenaState, inputs=StateSpec(inputs), products=StateSpec(products))
        self.order = order
        self.input_projection = nn.Linear(d_model, (order + 1) * d_model)
        self.short_convolution = short_convolution
        self.filters = ImplicitFilters((order - 1) * d_model, window)
        self.skips = nn.Parameter(torch.randn(order - 1, d_model))
        self.output_projection = nn.Linear(d_model, d_model)

    def mix(self, x: Tensor, state: HyenaState, mask: None) -> tuple[Tensor, HyenaState]:
        projected, inputs = self.short_convolution(self.input_projection(x), state.inputs)
        *gates, last_gate, z = at_least_float32(projected).chunk(self.order + 1, -1)
        filters, pasts = self.filters().chunk(self.order - 1, -1), []
        for gate, filter_, skip, past in zip(gates, filters, at_least_float32(self.skips), state.products.unbind(1)):
            product = gate * z
            convolved, past = convolve_window(product, filter_, past)
            z = convolved + skip * product
            pasts.append(past)
        return self.output_projection((last_gate * z).to(x.dtype)), HyenaState(inputs, torch.stack(pasts, 1))
