"""Formulas reach torch's FLOP counter whichever is loaded first, the package or the counter."""

import pytest

COUNT = """
import sys, torch
{first}
{second}
from torch.utils.flop_counter import FlopCounterMode
a = torch.ones(2, 5, 7)
with FlopCounterMode(display=False) as counted:
    recurra.scan.linear_scan(a, a, backend="numba")
    recurra.gate_loop(*(a[..., None] for _ in range(4)), backend="numba")
print("counted", counted.get_total_flops())
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [("import recurra", "import torch.utils.flop_counter"), ("import torch.utils.flop_counter", "import recurra")],
)
def test_whichever_comes_first(first, second, run_python):
    assert "counted 420" in run_python(COUNT.format(first=first, second=second))  # 2 and 4 for each of 70 numbers


def test_a_counter_that_was_made_before_the_first_call(run_python):
    program = COUNT.format(first="import recurra", second="").replace(
        "with FlopCounterMode(display=False) as counted:",
        "counted = FlopCounterMode(display=False)\nrecurra.scan.linear_scan(a, a, backend='numba')\nwith counted:",
    )
    assert "counted 420" in run_python(program)
