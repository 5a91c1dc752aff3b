"""Bad input to the GateLoop operator: each error names the argument, what came and what was expected."""

import pytest
import torch
from torch import ones

from recurra import gate_loop

# valid with B = 2, L = 5, H = 3, d_qk = 4, d_v = 6
WIDE = {"q": ones(2, 5, 3, 4), "k": ones(2, 5, 3, 4), "v": ones(2, 5, 3, 6), "a": ones(2, 5, 3, 1)}
WIDE["state"] = ones(2, 3, 4, 6)
STEP = {name: x if name == "state" else x[:, :1] for name, x in WIDE.items()}
MAX_HEADED = dict.fromkeys("qkva", ones(2, 5, 3, 1))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (WIDE | {"mode": "fast"}, ValueError, "mode is 'fast'; expected one of auto, recurrent, scan, chunk"),
        (WIDE | {"backend": "fast"}, ValueError, "backend is 'fast'; expected one of auto, reference, numba"),
        (STEP | {"backend": "fast"}, ValueError, "backend is 'fast'; expected one of auto, reference, numba"),
        (STEP | {"backend": "triton"}, RuntimeError, "backend is 'triton'; expected 'auto' or 'reference'"),
        (MAX_HEADED | {"backend": "triton"}, RuntimeError, "backend is 'triton'; expected 'auto' or 'reference'"),
        (WIDE | {"mode": "attention", "backend": "numba"}, RuntimeError, "'attention', which is plain torch"),
        (WIDE | {"mode": "fused"}, ValueError, "'fused' takes d_qk = d_v = 1, not 4 and 6"),
        (MAX_HEADED | {"mode": "fused", "q": ones(2, 5, 3, 1) + 0j}, ValueError, "'fused' takes real q, k and v"),
        (WIDE | {"k": [1.0]}, TypeError, r"k is a list; expected a torch\.Tensor"),
        (WIDE | {"v": ones(2, 5, 3, 6, dtype=torch.int64)}, TypeError, "v is int64 .*; expected floating-point or"),
        (WIDE | {"state": ones(2, 5, 3)}, ValueError, r"state is float32 \(2, 5, 3\) .*; expected \(B, H, d_qk, d_v\)"),
        (WIDE | {"k": ones(2, 5, 3, 6)}, ValueError, r"k is float32 \(2, 5, 3, 6\) .*; expected \(2, 5, 3, 4\)"),
        (WIDE | {"v": ones(2, 4, 3, 6)}, ValueError, r"v is float32 \(2, 4, 3, 6\) .*; expected \(2, 5, 3, 6\)"),
        (WIDE | {"a": ones(2, 5, 3, 6)}, ValueError, r"a is .*; expected \(2, 5, 3, 1\) or \(2, 5, 3, 4\)"),
        (WIDE | {"state": ones(2, 3, 6, 4)}, ValueError, r"state is .*; expected \(2, 3, 4, 6\)"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_bad_input(given, kind, message):
    with pytest.raises(kind, match=message):
        gate_loop(**given)
