"""The front door of the selective scan."""

from jaxtyping import Float
from torch import Tensor

from recurra.selectivescan.fused import by_kernels, kernels_take
from recurra.selectivescan.plain import in_pieces


def selective_scan(
    x: Float[Tensor, "B L D"],
    step: Float[Tensor, "B L D"],
    a: Float[Tensor, "D N"],
    b: Float[Tensor, "B L N"],
    c: Float[Tensor, "B L N"],
    h0: Float[Tensor, "B N D"],
) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B N D"]]:
    """Compute h_t = exp(step_t a) h_{t-1} + step_t x_t b_t and y_t = c_t h_t for every channel's own modes.

    Gu and Dao, arXiv 2312.00752, section 3.2.

    A step of 0 lets the state pass. On the CPU in float32 one kernel runs each pass; otherwise long sequences run in
    pieces of time. Either way the backward pass computes the states between kept ones again (as the published kernel
    does, Gu & Dao, section 3.3.2). Traces, and torch.func, take all steps at once.

    Args:
        x: the input, float32 or float64 like all others.
        step: the step sizes, Delta.
        a: eigenvalues, below 0 for modes that decay.
        b, c: how the modes read and are read, the same for all channels.
        h0: the state before the first step.

    Returns:
        y and the last state.
    """
    if kernels_take(x, step, a, b, c, h0):
        return by_kernels(x, step, a, b, c, h0)
    return in_pieces(x, step, a, b, c, h0)
