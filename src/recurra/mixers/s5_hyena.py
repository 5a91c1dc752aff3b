"""S5-Hyena: Hyena's gated recurrence with a state space model as its long convolution (Smith et al. 2023, arXiv
2208.04933; Hyena: Poli et al. 2023, arXiv 2302.10866; GateLoop Table 1 compares with it).
"""

from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import choose
from recurra.layers.convolution import ShortConvolution
from recurra.layers.state_space import DenseModes, require_pairs
from recurra.mixers.base import Mixer, StateSpec, register_mixer


class S5HyenaState(NamedTuple):
    """The state of both recurrences.

    inputs: the last inputs of the short convolutions, the oldest first.
    h: the kept modes.
    """

    inputs: Float[Tensor, "B K_1 D3"]
    h: Complex[Tensor, "B n"]


_ACTIVATIONS = ("gelu", "half-glu", "none")


@register_mixer("s5-hyena")
class S5Hyena(DenseModes, Mixer):
    """y = W_o (x_1 * f(SSM(x_2 * v))), with x_1, x_2, v = short convolutions of linear projections of x.

    This is Hyena of order 2 with S5's SSM over all channels, with a skip, in place of the implicit filter. The state
    has constant size; Hyena's is a window.

    Equal to the authors' code (src/s5dev/models/s5.py of github.com/lindermanlab/S5, branch development) at order 2,
    with one head, without dropout, with their activations gelu and half_glu2 and negative real parts of eigenvalues.
    Initialisation differs: steps, C and W_o are drawn like those of S5 and torch's linear layers. Defaults are those of
    their classes. Their WikiText-103 models have `d_state=128, blocks=32, clip_eigs=True, paired=False`, and those for
    associative recall `d_state=32, blocks=16, clip_eigs=True, activation="half-glu"`.

    Args:
        d_state: modes, an even number.
        kernel_size: steps of the short convolutions.
        activation: f, "gelu", "half-glu" (f(u) = u * sigmoid(W GELU(u) + b)) or "none".
        blocks: blocks of the initial HiPPO-N matrix, a divisor of d_state / 2.
        clip_eigs: keep the real parts of the eigenvalues at most at -1e-4.
        paired: keep one mode of each conjugate pair; False keeps all `d_state` modes and trains each independently.
        min_step, max_step: initial step sizes are spaced logarithmically between these, one per kept mode.
    """

    skips_padding = True

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 64,
        kernel_size: int = 3,
        activation: str = "gelu",
        blocks: int = 1,
        clip_eigs: bool = False,
        paired: bool = True,
        min_step: float = 0.001,
        max_step: float = 0.1,
    ) -> None:
        require_pairs(d_state)
        short_convolution = ShortConvolution(3 * d_model, kernel_size)
        n_kept = d_state // 2 if paired else d_state
        inputs, h = StateSpec((kernel_size - 1, 3 * d_model)), StateSpec((n_kept,), is_complex=True)
        super().__init__(d_model, S5HyenaState, inputs=inputs, h=h)
        self.activation = choose("activation", {name: name for name in _ACTIVATIONS}, activation)
        self.input_projection = nn.Linear(d_model, 3 * d_model)
        self.short_convolution = short_convolution
        self.make_modes(
            d_model,
            d_state=d_state,
            min_step=min_step,
            max_step=max_step,
            blocks=blocks,
            clip_eigs=clip_eigs,
            paired=paired,
        )
        self.gate = nn.Linear(d_model, d_model) if activation == "half-glu" else None
        self.output_projection = nn.Linear(d_model, d_model)

    def mix(self, x: Tensor, state: S5HyenaState, mask: Tensor | None) -> tuple[Tensor, S5HyenaState]:
        projected, inputs = self.short_convolution(self.input_projection(x), state.inputs, mask)
        x_1, x_2, v = projected.chunk(3, -1)
        u, h = self.run_modes(x_2 * v, state.h, mask)
        if self.gate is not None:
            u = u * torch.sigmoid(self.gate(functional.gelu(u)))
        elif self.activation == "gelu":
            u = functional.gelu(u)
        return self.output_projection((x_1 * u).to(x.dtype)), S5HyenaState(inputs, h)
