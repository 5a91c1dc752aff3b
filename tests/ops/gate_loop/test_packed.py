"""gate_loop over packed sequences, in every mode and on every backend, against a loop over them."""

from typing import get_args

import pytest
import torch
from tests.gradients import require_same_gradients

from recurra.ops.gate_loop.operator import Mode, gate_loop

LENGTHS = [5, 0, 70, 1, 9]
BORDERS = torch.tensor([0, *LENGTHS]).cumsum(0)


def modes_of(case):
    for mode in get_args(Mode):
        if mode != "fused" or (case.d_qk == case.d_v == 1 and not set("qkv") & set(case.complex_)):
            for backend in ("auto",) if mode in ("auto", "recurrent", "attention") else ("reference", "numba"):
                yield mode, backend


@pytest.mark.parametrize("has_state", [True, False])
def test_sequences_are_run_apart(case, has_state):
    for mode, backend in modes_of(case):
        lengths = LENGTHS if mode in ("auto", "chunk") else [5, 0, 20, 1, 9]  # chunks have 64 steps, blocks 16
        drawn = case.draw(sum(lengths), batch=1)
        drawn = drawn._replace(state=case.draw(1, batch=len(lengths)).state)
        q, k, v, a, state = leaves = [x.clone().requires_grad_() for x in drawn]
        options = {"mode": mode, "backend": backend}
        h0 = state if has_state else None
        borders = torch.tensor([0, *lengths]).cumsum(0)
        y, last = gate_loop(q, k, v, a, state=h0, cu_seqlens=borders, **options)
        parts = [
            gate_loop(*inputs, state=h0[number : number + 1] if has_state else None, **options)
            for number, inputs in enumerate(zip(*(x.split(lengths, 1) for x in (q, k, v, a))))
        ]
        expected = torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts])
        require_same_gradients((y, last), expected, leaves, 1e-11)


def test_nan_stays_in_its_sequence(case):
    drawn = case.draw(sum(LENGTHS), batch=1)
    q, k, v, a = (x.clone() for x in drawn[:4])
    for x in (q, k, v, a):
        x[:, 5:75] = torch.nan
    inputs = [x.requires_grad_() for x in (q, k, v, a)]
    for mode, backend in modes_of(case):
        y, last = gate_loop(*inputs, cu_seqlens=BORDERS, mode=mode, backend=backend)
        clean = torch.cat([y[:, :5], y[:, 75:]], 1)
        assert clean.isfinite().all()
        assert last[[0, 1, 3, 4]].isfinite().all()
        assert last[2].isnan().any()
        gradients = torch.autograd.grad(clean.abs().sum(), inputs)
        assert all(torch.cat([g[:, :5], g[:, 75:]], 1).isfinite().all() for g in gradients)


def test_the_mode_is_chosen_for_all_sequences():
    """Alone, a single step of such heads runs in mode "recurrent", which has no kernels."""
    q, k, v, a = (torch.randn(1, 6, 2, size, dtype=torch.float64) for size in (3, 3, 2, 1))
    y, last = gate_loop(q, k, v, a, cu_seqlens=torch.tensor([0, 5, 6]), backend="numba")
    expected, h = gate_loop(q[:, 5:], k[:, 5:], v[:, 5:], a[:, 5:])
    torch.testing.assert_close(y[:, 5:], expected)
    torch.testing.assert_close(last[1:], h)
    y, last = gate_loop(q[:, 5:], k[:, 5:], v[:, 5:], a[:, 5:], cu_seqlens=torch.tensor([0, 1]), backend="numba")
    torch.testing.assert_close((y, last), (expected, h))
