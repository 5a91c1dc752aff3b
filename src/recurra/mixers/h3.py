"""H3, Hungry Hungry Hippos: two state space models between gates (Fu et al., arXiv 2212.14052, section 3)."""

from typing import NamedTuple

from jaxtyping import Complex, Float
from torch import Tensor, nn

from recurra.checks import require, require_at_least
from recurra.layers.convolution import ShortConvolution
from recurra.layers.norms import at_least_float32
from recurra.layers.state_space import ChannelModes, ChannelSSM, require_pairs, run_channels
from recurra.mixers.base import Mixer, StateSpec, register_mixer


class H3State(NamedTuple):
    """The state of both state space models.

    shift: the state of the shift SSM, the last d_state - 1 keys, the oldest first.
    h: the kept modes of the diagonal SSM, for every product of a key's and a value's channel in a head.
    """

    shift: Float[Tensor, "B K_1 D"]
    h: Complex[Tensor, "B products n"]


@register_mixer("h3")
class H3(ChannelModes, Mixer):
    """y = W_o (q * SSM_diag(SSM_shift(k) * v)), with q, k, v = linear projections of x (Algorithm 1).

    The shift SSM, which remembers keys, is a causal convolution of d_state taps per channel; the diagonal SSM is S4D
    with a skip (`recurra.layers.state_space`). With head_dim above 1, a head's key and value form an outer product, the
    head has one diagonal SSM for all its entries, and q contracts the result: y_j = sum_i q_i SSM_diag(k_i v_j).

    Equal to the authors' code (src/models/ssm/h3.py of github.com/HazyResearch/H3) with fewer parameters: B, C and D of
    its shift SSM are one filter here, and B of its diagonal SSM is part of C. Initialisation differs: D of its shift
    SSM is drawn from N(0, 1) and added to the tap of the current step, which is initialised like all other taps here.

    Args:
        d_state: taps of the shift SSM and modes of the diagonal one, an even number (the paper's m and published 64).
        head_dim: channels of a head, a divisor of d_model; 1, elementwise products, as published.
        discretisation: of the diagonal SSM, "bilinear", or "zoh" (zero-order hold).
        min_step, max_step: initial step sizes of the diagonal SSM, spaced logarithmically, one per head.
    """

    starts_from_none = True  # the convolution then has no state to add

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 64,
        head_dim: int = 1,
        discretisation: str = "bilinear",
        min_step: float = 0.001,
        max_step: float = 0.1,
    ) -> None:
        require_pairs(d_state)
        require_at_least(1, d_model=d_model, head_dim=head_dim)
        require(d_model % head_dim == 0, "head_dim", head_dim, f"a divisor of d_model = {d_model}")
        shift, h = StateSpec((d_state - 1, d_model)), StateSpec((d_model * head_dim, d_state // 2), is_complex=True)
        super().__init__(d_model, H3State, shift=shift, h=h)
        self.head_dim = head_dim
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.shift = ShortConvolution(d_model, d_state, bias=False)
        self.make_modes(
            d_model // head_dim,
            d_state=d_state,
            init="lin",
            discretisation=discretisation,
            min_step=min_step,
            max_step=max_step,
        )
        self.output_projection = nn.Linear(d_model, d_model)

    def mix(self, x: Tensor, state: H3State | None, mask: None) -> tuple[Tensor, H3State]:
        q, k, v = (at_least_float32(part) for part in self.qkv(x).chunk(3, -1))
        k, shifted = self.shift(k, None if state is None else state.shift)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        products = (k[..., :, None] * v[..., None, :]).flatten(2)  # (B, L, H d_k d_v)
        n_products = self.head_dim**2
        ssm = ChannelSSM(*(part.repeat_interleave(n_products, 0) for part in self.ssm()))
        u, h = run_channels(products, ssm, None if state is None else state.h)
        u = u + products * at_least_float32(self.skip).repeat_interleave(n_products)
        y = (q[..., None] * u.unflatten(-1, (-1, self.head_dim, self.head_dim))).sum(-2)
        return self.output_projection(y.flatten(2).to(x.dtype)), H3State(shifted, h)
