"""How far a curve goes: the cost of the next length, estimated from the previous ones."""

from collections.abc import Sequence
from typing import NamedTuple


class Limits(NamedTuple):
    """A curve ends before a call of more than `seconds`, or of more than `gigabytes` with its inputs."""

    seconds: float
    gigabytes: float


def next_cost(costs: Sequence[float]) -> float:
    """Estimate the cost of twice the length: by the mean growth of the last two doublings, from linear to quadratic.

    Raises:
        ValueError: there are no costs.
    """
    if not costs:
        raise ValueError("costs is empty; expected the costs of the lengths so far")
    if len(costs) < 3 or costs[-3] <= 0:
        return 4 * costs[-1]
    growth = (costs[-1] / costs[-3]) ** 0.5
    return costs[-1] * min(max(growth, 2.0), 4.0)
