"""minGRU against its equations, step by step and in closed form."""

import pytest
import torch
from torch.nn import functional

from recurra.mixers.min_gru import MinGRU, MinGRUState

D_MODEL = 5


def parts(layer: MinGRU, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate z and the candidate c of section 3.1, each from its own weights."""
    (w_z, w_h), (b_z, b_h) = (p.chunk(2) for p in (layer.gate_and_candidate.weight, layer.gate_and_candidate.bias))
    return torch.sigmoid(functional.linear(x, w_z, b_z)), functional.linear(x, w_h, b_h)


def by_a_loop(layer: MinGRU, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    outputs = []
    for step in x.unbind(1):
        z, candidate = parts(layer, step)
        h = (1 - z) * h + z * candidate
        outputs.append(h)
    return torch.stack(outputs, 1)


def test_it_is_its_recurrence_outputs_state_and_gradients():
    layer = MinGRU(D_MODEL).double()
    x = torch.randn(3, 17, D_MODEL, dtype=torch.float64, requires_grad=True)
    h0 = torch.randn(3, D_MODEL, dtype=torch.float64, requires_grad=True)
    leaves = [x, h0, *layer.parameters()]
    y, state = layer(x, MinGRUState(h0))
    expected = by_a_loop(layer, x, h0)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(state.h, expected[:, -1], rtol=1e-12, atol=1e-13)
    weights = torch.randn_like(y)
    found = torch.autograd.grad((weights * y).sum() + state.h.sin().sum(), leaves)
    wanted = torch.autograd.grad((weights * expected).sum() + expected[:, -1].sin().sum(), leaves)
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_it_starts_from_zeros():
    layer, x = MinGRU(D_MODEL).double(), torch.randn(2, 6, D_MODEL, dtype=torch.float64)
    zeros = torch.zeros(2, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], by_a_loop(layer, x, zeros), rtol=1e-12, atol=1e-13)
    assert torch.equal(layer.initial_state(2).h, zeros)


def test_an_output_is_a_weighted_mean_of_the_candidates():
    """h_t = sum_s w_ts c_s with w_ts = z_s prod_{s<r<=t} (1 - z_r): between the smallest candidate, or 0, and the
    largest."""
    layer, x = MinGRU(D_MODEL).double(), torch.randn(1, 9, D_MODEL, dtype=torch.float64)
    z, candidates = parts(layer, x)
    for t in range(9):
        weights = torch.stack([z[0, s] * (1 - z[0, s + 1 : t + 1]).prod(0) for s in range(t + 1)])
        assert (weights.sum(0) < 1).all()
        expected = (weights * candidates[0, : t + 1]).sum(0)
        torch.testing.assert_close(layer(x)[0][0, t], expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("bias", "is_open"), [(60.0, True), (-60.0, False)])
def test_an_open_gate_writes_the_candidate_and_a_closed_one_keeps_the_state(bias, is_open):
    layer, x = MinGRU(D_MODEL).double(), torch.randn(2, 4, D_MODEL, dtype=torch.float64)
    h0 = torch.randn(2, D_MODEL, dtype=torch.float64)
    with torch.no_grad():
        layer.gate_and_candidate.bias[:D_MODEL] = bias
    expected = parts(layer, x)[1] if is_open else h0[:, None].expand(2, 4, D_MODEL)
    torch.testing.assert_close(layer(x, MinGRUState(h0))[0], expected, rtol=1e-9, atol=1e-9)


def test_padding_neither_writes_nor_forgets():
    layer = MinGRU(D_MODEL).double()
    mask = torch.tensor([[0, 1, 0, 0, 1, 1, 0]]).bool()
    x = torch.randn(1, 7, D_MODEL, dtype=torch.float64)
    alone, last = layer(x[mask][None])
    y, state = layer(x.masked_fill(~mask[..., None], torch.nan), mask=mask)
    torch.testing.assert_close(y[mask], alone[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(state.h, last.h, rtol=1e-12, atol=1e-13)
    assert y[~mask].eq(0).all()


def test_a_bfloat16_layer_recurs_in_float32():
    layer, x = MinGRU(D_MODEL).bfloat16(), torch.randn(2, 30, D_MODEL).bfloat16()
    y, state = layer(x)
    assert (y.dtype, state.h.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(y.float(), layer.float()(x.float())[0], rtol=0.05, atol=0.05)


def test_the_state_is_float32_under_autocast():
    layer, x = MinGRU(D_MODEL), torch.randn(2, 30, D_MODEL)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x)
        _, state = layer(x, state)
    assert state.h.dtype == torch.float32
    torch.testing.assert_close(y.float(), layer(x)[0], rtol=0.05, atol=0.05)


def test_the_state_is_one_vector_in_its_own_memory():
    _, state = MinGRU(D_MODEL)(torch.randn(2, 500, D_MODEL))
    assert state.h.shape == (2, D_MODEL)
    assert state.h.untyped_storage().nbytes() == 2 * D_MODEL * 4


def test_bad_sizes_and_states_are_refused():
    with pytest.raises(ValueError, match="d_model is 0; expected at least 1"):
        MinGRU(0)
    with pytest.raises(ValueError, match=r"state\.h is float32 \(3, 5\) on cpu; expected float32 \(2, 5\) on cpu"):
        MinGRU(D_MODEL)(torch.randn(2, 3, D_MODEL), MinGRUState(torch.zeros(3, D_MODEL)))
