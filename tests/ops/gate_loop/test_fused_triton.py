"""When the fused Triton kernels are refused; tests/test_triton.py runs them."""

import pytest
import torch

from recurra import gate_loop


def test_refused_on_the_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.ones(2, 5, 3, 1)
    with pytest.raises(
        RuntimeError,
        match=r"backend is 'triton'; .*: Triton('s kernels run on CUDA, .* on cpu| is not installed)",
    ):
        gate_loop(x, x, x, x, backend="triton")
