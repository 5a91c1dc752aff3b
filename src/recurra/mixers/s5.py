"""S5: one state space model over all channels (Smith et al. 2023, "Simplified State Space Layers for Sequence
Modeling", arXiv 2208.04933; GateLoop section 2.2).
"""

from typing import NamedTuple

import torch
from jaxtyping import Complex
from torch import Tensor, nn
from torch.nn import functional

from recurra.layers.state_space import DenseModes, require_pairs
from recurra.mixers.base import Mixer, StateSpec, register_mixer


class S5State(NamedTuple):
    """The kept modes."""

    h: Complex[Tensor, "B n"]


@register_mixer("s5")
class S5(DenseModes, Mixer):
    """y = u * sigmoid(W u), u = GELU(SSM(x) + skip x), with one SSM that reads and writes all channels.

        h_t = a h_{t-1} + b x_t,  SSM(x)_t = 2 Re(C h_t),  a and b by zero-order hold (GateLoop (2)-(5))

    `recurra.layers.state_space` defines the modes and their initialisation, with V folded in (GateLoop (3a)). The gate
    is the published layer's; the initialisation is not, as explained there. The published code can also run in both
    directions, which the causal contract excludes, and keep all modes of the pairs.

    Args:
        d_state: modes, an even number (the paper's P).
        blocks: blocks of the initial HiPPO-N matrix, a divisor of d_state / 2 (the paper's J).
        discretisation: "zoh" (zero-order hold) or "bilinear".
        clip_eigs: keep the real parts of the eigenvalues at most at -1e-4.
        gated: with False, y is SSM(x) + skip x, without GELU and gate.
        min_step, max_step: initial step sizes are spaced logarithmically between these, one per kept mode.
    """

    skips_padding = True

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 64,
        blocks: int = 1,
        discretisation: str = "zoh",
        clip_eigs: bool = False,
        gated: bool = True,
        min_step: float = 0.001,
        max_step: float = 0.1,
    ) -> None:
        require_pairs(d_state)
        super().__init__(d_model, S5State, h=StateSpec((d_state // 2,), is_complex=True))
        self.make_modes(
            d_model,
            d_state=d_state,
            min_step=min_step,
            max_step=max_step,
            blocks=blocks,
            discretisation=discretisation,
            clip_eigs=clip_eigs,
        )
        self.gate = nn.Linear(d_model, d_model) if gated else None

    def mix(self, x: Tensor, state: S5State, mask: Tensor | None) -> tuple[Tensor, S5State]:
        y, h = self.run_modes(x, state.h, mask)
        if self.gate is None:
            return y, S5State(h)
        u = functional.gelu(y)
        return u * torch.sigmoid(self.gate(u)), S5State(h)
