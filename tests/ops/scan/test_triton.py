"""When Triton's kernels are chosen; tests/test_triton.py runs it."""

import pytest
import torch

from recurra import gate_loop, linear_scan
from recurra.ops._toolkit import backends
from recurra.ops._toolkit.backends import choose_backend

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_on_the_cpu_only_in_the_interpreter(monkeypatch):
    monkeypatch.setattr(backends, "TRITON_IS_MISSING", "")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    message = r"backend is 'triton'; .* run on CUDA, and the tensors are on cpu \(.*TRITON_INTERPRET=1\)"
    with pytest.raises(RuntimeError, match=message):
        linear_scan(torch.ones(3), torch.ones(2, 4, 3), backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match=message):
        choose_backend("triton", CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_backend("triton", CPU) == "triton"
    assert choose_backend("auto", CPU) == "numba", "auto never takes the interpreter"


def test_auto_takes_it_on_cuda_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(backends, "TRITON_IS_MISSING", "")
    assert choose_backend("auto", GPU) == choose_backend("triton", GPU) == "triton"
    assert choose_backend("reference", GPU) == "reference"
    monkeypatch.setattr(backends, "TRITON_IS_MISSING", "Triton is not installed")
    monkeypatch.setattr(backends, "_has_warned", False)
    with pytest.warns(RuntimeWarning, match="Triton is not installed: recurra uses its plain torch .* on cuda:0"):
        assert choose_backend("auto", GPU) == "reference"
    with pytest.raises(RuntimeError, match=r"backend is 'triton'; expected 'auto' or 'reference': Triton is not"):
        choose_backend("triton", GPU)


@pytest.mark.parametrize(("mode", "d_head"), [("fused", 1), ("chunk", 2)])
def test_the_gate_loop_on_the_cpu(mode, d_head, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.ones(2, 5, 3, d_head)
    message = r"backend is 'triton'; .*: Triton('s kernels run on CUDA, .* on cpu| is not installed)"
    with pytest.raises(RuntimeError, match=message):
        gate_loop(x, x, x, x, mode=mode, backend="triton")
