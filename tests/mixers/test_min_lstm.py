"""minLSTM against its equations, step by step and in its limits."""

import pytest
import torch
from tests.mixers.stepwise import require_float32_states, require_padding_skipped, require_same
from torch.nn import functional

from recurra.mixers.min_lstm import MinLSTM, MinLSTMState

D_MODEL = 5


def parts(layer: MinLSTM, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """f' and i', the normalised gates of section 3.2.3, and the candidate, each from its own weights."""
    weights, biases = (p.chunk(3) for p in (layer.gates_and_candidate.weight, layer.gates_and_candidate.bias))
    f, i, candidate = (functional.linear(x, w, b) for w, b in zip(weights, biases))
    f, i = torch.sigmoid(f), torch.sigmoid(i)
    return f / (f + i), i / (f + i), candidate


def by_a_loop(layer: MinLSTM, x: torch.Tensor, state: MinLSTMState) -> tuple[torch.Tensor, MinLSTMState]:
    outputs, h = [], state.h
    for step in x.unbind(1):
        f, i, candidate = parts(layer, step)
        h = f * h + i * candidate
        outputs.append(h)
    return torch.stack(outputs, 1), MinLSTMState(h)


def test_outputs_state_and_gradients_are_the_papers():
    layer = MinLSTM(D_MODEL).double()
    state = MinLSTMState(torch.randn(3, D_MODEL, dtype=torch.float64))
    require_same(layer, by_a_loop, torch.randn(3, 17, D_MODEL, dtype=torch.float64), state, 1e-12)


def test_it_starts_from_zeros():
    layer, x = MinLSTM(D_MODEL).double(), torch.randn(2, 6, D_MODEL, dtype=torch.float64)
    expected, _ = by_a_loop(layer, x, layer.initial_state(2))
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-12, atol=1e-13)
    assert layer.initial_state(2).h.eq(0).all()


def test_equal_gates_take_the_mean_however_small_both_are():
    """f' = i' = 1/2: with gates of exp(-200), whose quotient is 0 / 0 in float32."""
    layer, x = MinLSTM(D_MODEL), torch.randn(1, 1, D_MODEL)
    with torch.no_grad():
        layer.gates_and_candidate.weight[: 2 * D_MODEL] = 0
        layer.gates_and_candidate.bias[: 2 * D_MODEL] = -200.0
    h = torch.randn(1, D_MODEL)
    expected = (h + functional.linear(x[0], *(p[2 * D_MODEL :] for p in layer.gates_and_candidate.parameters()))) / 2
    torch.testing.assert_close(layer(x, MinLSTMState(h))[0][:, 0], expected)


@pytest.mark.parametrize(("forget", "write"), [(60.0, -60.0), (-60.0, 60.0)])
def test_gates_in_their_limits_keep_the_state_or_write_the_candidate(forget, write):
    layer, x = MinLSTM(D_MODEL).double(), torch.randn(2, 4, D_MODEL, dtype=torch.float64)
    with torch.no_grad():
        layer.gates_and_candidate.bias[:D_MODEL] = forget
        layer.gates_and_candidate.bias[D_MODEL : 2 * D_MODEL] = write
    h = torch.randn(2, D_MODEL, dtype=torch.float64)
    expected = h[:, None].expand(2, 4, D_MODEL) if forget > 0 else parts(layer, x)[2]
    torch.testing.assert_close(layer(x, MinLSTMState(h))[0], expected, rtol=1e-12, atol=1e-13)


def test_both_gates_matter():
    """Unlike minGRU's one gate: a large forget gate beside a large input gate halves the state."""
    layer, x = MinLSTM(D_MODEL).double(), torch.zeros(1, 1, D_MODEL, dtype=torch.float64)
    with torch.no_grad():
        layer.gates_and_candidate.bias.copy_(torch.tensor([40.0, 40.0, 0.0]).repeat_interleave(D_MODEL))
    h = torch.randn(1, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(layer(x, MinLSTMState(h))[1].h, h / 2, rtol=1e-12, atol=1e-13)


def test_padding_neither_writes_nor_forgets():
    require_padding_skipped(MinLSTM(D_MODEL).double(), D_MODEL)


def test_the_recurrence_is_in_float32():
    require_float32_states(lambda: MinLSTM(D_MODEL), D_MODEL)


def test_bad_sizes_and_states_are_refused():
    with pytest.raises(ValueError, match="d_model is 0; expected at least 1"):
        MinLSTM(0)
    with pytest.raises(ValueError, match=r"state\.h is float32 \(3, 5\) on cpu; expected float32 \(2, 5\) on cpu"):
        MinLSTM(D_MODEL)(torch.randn(2, 3, D_MODEL), MinLSTMState(torch.zeros(3, D_MODEL)))
