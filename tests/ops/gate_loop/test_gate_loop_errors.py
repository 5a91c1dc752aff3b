"""Bad input to the GateLoop operator: each error names the argument, what came and what was expected."""

import pytest
import torch

from recurra import gate_loop


def arguments(**changes):
    """Valid arguments for B = 2, L = 5, H = 3, d_qk = 4, d_v = 6, except for the changes."""
    shapes = {"q": (2, 5, 3, 4), "k": (2, 5, 3, 4), "v": (2, 5, 3, 6), "a": (2, 5, 3, 1), "state": (2, 3, 4, 6)}
    return {name: torch.ones(shape) for name, shape in shapes.items()} | changes


def max_headed(**changes):
    one = torch.ones(2, 5, 3, 1)
    return {"q": one, "k": one, "v": one, "a": one} | changes


ones = torch.ones
BAD_INPUT = {
    "no such mode": (
        arguments(mode="fast"),
        ValueError,
        "mode is 'fast'; expected one of auto, recurrent, scan, chunk, attention",
    ),
    "no such backend": (
        arguments(backend="fast"),
        ValueError,
        "backend is 'fast'; expected one of auto, reference, numba",
    ),
    "the GPU kernel on the CPU": (
        max_headed(backend="triton"),
        RuntimeError,
        "backend is 'triton'; expected 'auto' or 'reference': (Triton's kernels run on CUDA|Triton is not)",
    ),
    "a backend for a mode without": (
        arguments(mode="attention", backend="numba"),
        RuntimeError,
        "backend is 'numba'; expected 'auto' or 'reference' for mode 'attention', which is plain torch",
    ),
    "fused with wide heads": (
        arguments(mode="fused"),
        ValueError,
        "mode is 'fused'; expected .*: 'fused' takes d_qk = d_v = 1, not 4 and 6",
    ),
    "fused with complex q": (
        max_headed(mode="fused", q=ones(2, 5, 3, 1) + 0j),
        ValueError,
        "mode is 'fused'; expected 'auto' or another mode: 'fused' takes real q, k and v",
    ),
    **{
        f"{name} a list": (arguments(**{name: [1.0]}), TypeError, rf"{name} is a list; expected a torch\.Tensor")
        for name in ("q", "k", "v", "a", "state")
    },
    **{
        f"{name} of integers": (
            arguments(**{name: arguments()[name].long()}),
            TypeError,
            rf"{name} is int64 .* on cpu; expected floating-point or complex numbers",
        )
        for name in ("q", "k", "v", "a", "state")
    },
    **{
        f"{name} with three dimensions": (
            arguments(**{name: ones(2, 5, 3)}),
            ValueError,
            rf"{name} is float32 \(2, 5, 3\) .*; expected \(B, {'H, d_qk, d_v' if name == 'state' else 'L, H, d'}\)",
        )
        for name in ("q", "k", "v", "a", "state")
    },
    "k of other channels": (
        arguments(k=ones(2, 5, 3, 6)),
        ValueError,
        r"k is float32 \(2, 5, 3, 6\) .*; expected \(2, 5, 3, 4\)",
    ),
    "v of another length": (
        arguments(v=ones(2, 4, 3, 6)),
        ValueError,
        r"v is float32 \(2, 4, 3, 6\) .*; expected \(2, 5, 3, 6\)",
    ),
    "a per value channel": (
        arguments(a=ones(2, 5, 3, 6)),
        ValueError,
        r"a is float32 \(2, 5, 3, 6\) .*; expected \(2, 5, 3, 1\) or \(2, 5, 3, 4\)",
    ),
    "the state turned round": (
        arguments(state=ones(2, 3, 6, 4)),
        ValueError,
        r"state is float32 \(2, 3, 6, 4\) .*; expected \(2, 3, 4, 6\)",
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(case):
    given, kind, message = BAD_INPUT[case]
    with pytest.raises(kind, match=message):
        gate_loop(**given)


@pytest.mark.usefixtures("unchecked")
def test_the_good_input_that_the_bad_ones_differ_from():
    y, state = gate_loop(**arguments())
    assert (y.shape, state.shape) == ((2, 5, 3, 6), (2, 3, 4, 6))
    assert gate_loop(**max_headed())[0].shape == (2, 5, 3, 1)
