"""Temperature: how far chance may leave the likeliest tokens."""

import math

from jaxtyping import Float
from torch import Tensor

from recurra.layers.precision import at_least_float32


def apply_temperature(logits: Float[Tensor, "*batch V"], temperature: float) -> Float[Tensor, "*batch V"]:
    """Give logits / temperature, in float32 or better: below 1 likely tokens gain, above 1 unlikely ones do.

    Raises:
        ValueError: the temperature is not a positive, finite number. Its limit of 0 is `greedy`.
    """
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature is {temperature}; expected a finite number above 0")
    return at_least_float32(logits) / temperature
