"""Bad input to the delta rule: each error names the argument, what came and what was expected."""

import pytest
import torch

from recurra import delta_rule

ones = torch.ones
SHAPES = {
    "q": (2, 5, 3, 4), "k": (2, 5, 3, 4), "v": (2, 5, 3, 6), "a": (2, 5, 3), "b": (2, 5, 3, 1), "state": (2, 3, 4, 6),
}  # fmt: skip
DIMENSIONS = {
    **dict.fromkeys("qkv", r"\(B, L, H, d\)"),
    **dict.fromkeys("ab", r"\(B, L, H\) or \(B, L, H, 1\)"),
    "state": r"\(B, H, d_qk, d_v\)",
}


def arguments(**changes):
    return {name: torch.ones(shape) for name, shape in SHAPES.items()} | changes


BAD_INPUT = {
    "no such mode": (
        arguments(mode="fast"),
        ValueError,
        "mode is 'fast'; expected one of auto, recurrent, chunk",
    ),
    **{
        f"{name} a list": (arguments(**{name: [1.0]}), TypeError, rf"{name} is a list; expected a torch\.Tensor")
        for name in SHAPES
    },
    **{
        f"{name} of {kind} numbers": (
            arguments(**{name: arguments()[name].to(kind)}),
            TypeError,
            rf"{name} is {str(kind)[6:]} .* on cpu; expected real floating-point numbers",
        )
        for name in SHAPES
        for kind in (torch.int64, torch.complex64)
    },
    **{
        f"{name} with two dimensions": (
            arguments(**{name: ones(2, 5)}),
            ValueError,
            rf"{name} is float32 \(2, 5\) on cpu; expected {DIMENSIONS[name]}",
        )
        for name in SHAPES
    },
    **{
        f"{name} elsewhere": (
            arguments(**{name: arguments()[name].to("meta")}),
            ValueError,
            rf"{name} is float32 .* on meta; expected a tensor on cpu, as q",
        )
        for name in SHAPES
        if name != "q"
    },
    "k of other channels": (arguments(k=ones(2, 5, 3, 6)), ValueError, r"k is .*; expected \(2, 5, 3, 4\)"),
    "v of another length": (arguments(v=ones(2, 4, 3, 6)), ValueError, r"v is .*; expected \(2, 5, 3, 6\)"),
    "a per channel": (
        arguments(a=ones(2, 5, 3, 4)),
        ValueError,
        r"a is float32 \(2, 5, 3, 4\) .*; expected \(2, 5, 3\) or \(2, 5, 3, 1\)",
    ),
    "b of other heads": (arguments(b=ones(2, 5, 1)), ValueError, r"b is .*; expected \(2, 5, 3\) or \(2, 5, 3, 1\)"),
    "the state turned round": (arguments(state=ones(2, 3, 6, 4)), ValueError, r"state is .*; expected \(2, 3, 4, 6\)"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(case):
    given, kind, message = BAD_INPUT[case]
    with pytest.raises(kind, match=message):
        delta_rule(**given)


@pytest.mark.usefixtures("unchecked")
def test_the_good_input_that_the_bad_ones_differ_from():
    y, state = delta_rule(**arguments())
    assert (y.shape, state.shape) == ((2, 5, 3, 6), (2, 3, 4, 6))
