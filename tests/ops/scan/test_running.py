"""Running maxima against a loop."""

import pytest
import torch

from recurra.ops.scan.reference import running_maximum


@pytest.mark.parametrize("length", [1, 2, 9])
def test_each_step_has_the_largest_number_so_far(length):
    x = torch.randn(3, length, 2)
    expected = [x[:, : t + 1].amax(1) for t in range(length)]
    assert torch.equal(running_maximum(x), torch.stack(expected, 1))
