"""The repetition penalty: tokens that were there lately become less likely (CTRL, arXiv 1909.05858, section 4.1)."""

import math

from jaxtyping import Float, Int
from torch import Tensor

from recurra.layers.precision import at_least_float32


def penalise_repetition(
    logits: Float[Tensor, "*batch V"], recent: Int[Tensor, "*batch n"], penalty: float
) -> Float[Tensor, "*batch V"]:
    """Divide the positive logits of the tokens in `recent` by `penalty` and multiply the negative ones by it.

    How often a token is among them makes no difference. The paper divides all; a negative logit would rise by that, so
    it is multiplied, as is usual. The penalty acts on the numbers that come in: log-probabilities, which an adaptive
    softmax gives, are all negative.

    Args:
        logits: of any batch; computed in float32 or better.
        recent: token ids for every row, any number.
        penalty: 1 changes nothing; below 1, repetition is favoured.

    Raises:
        ValueError: the penalty is not a positive, finite number.
    """
    if not (penalty > 0 and math.isfinite(penalty)):
        raise ValueError(f"penalty is {penalty}; expected a finite number above 0")
    logits = at_least_float32(logits)
    chosen = logits.gather(-1, recent)
    return logits.scatter(-1, recent, (chosen * penalty).where(chosen < 0, chosen / penalty))
