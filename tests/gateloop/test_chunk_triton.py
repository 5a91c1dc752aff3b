"""The Triton kernels of mode "chunk", in a process of its own."""

from pathlib import Path

import pytest
import torch

from recurra import gate_loop


def test_the_kernels(run_with_triton):
    run_with_triton(Path(__file__).with_name("interpreted_triton_chunk.py"))


def test_refused_on_the_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.ones(2, 5, 3, 2)
    with pytest.raises(
        RuntimeError,
        match=r"backend is 'triton'; .*: Triton('s kernels run on CUDA, .* on cpu| is not installed)",
    ):
        gate_loop(x, x, x, x, mode="chunk", backend="triton")
