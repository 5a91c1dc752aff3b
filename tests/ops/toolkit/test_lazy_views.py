"""Lazily negated and conjugated tensors: their memory has other numbers than they have, and kernels read memory."""

import pytest
import torch

from recurra import create_mixer, gate_loop, linear_scan


@pytest.mark.parametrize(
    "name", ["gru", "slstm", "performer", "hyena", "mamba", "mamba3", "gateloop", "gated-delta-net"]
)
@pytest.mark.parametrize("trains", [False, True])
def test_a_negated_input_is_what_it_stands_for(name, trains):
    mixer = create_mixer(name, 16)
    x = torch.conj(torch.randn(2, 9, 16, dtype=torch.complex64)).imag
    assert x.is_neg()
    with torch.set_grad_enabled(trains):
        y, negated = mixer(x)[0], mixer(x.resolve_neg())[0]
    torch.testing.assert_close(y, negated)


def test_a_conjugated_input_is_what_it_stands_for():
    a, b = torch.polar(torch.rand(2, 9, 3), torch.rand(2, 9, 3)), torch.randn(2, 9, 3, dtype=torch.complex64)
    torch.testing.assert_close(
        linear_scan(a.conj(), b.conj()), linear_scan(a.conj().resolve_conj(), b.conj().resolve_conj())
    )
    q, k, v = (torch.randn(2, 9, 4) for _ in range(3))
    a = torch.polar(torch.rand(2, 9, 4), torch.rand(2, 9, 4))
    torch.testing.assert_close(gate_loop(q, k, v, a.conj()), gate_loop(q, k, v, a.conj().resolve_conj()))
