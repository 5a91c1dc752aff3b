"""Diagonal state space models: discretisation, and the convolution against the recurrence and a plain loop."""

import pytest
import torch
from tests.gradients import require_near
from torch.utils._python_dispatch import TorchDispatchMode

from recurra.layers.state_space import (
    _DISCRETISATIONS,
    _SHORT,
    ChannelSSM,
    _bilinear,
    _run_channels_by_convolution,
    _run_channels_by_recurrence,
    log_spaced_steps,
    run_channels,
    run_dense,
    zero_order_hold,
)

EIGENVALUES = torch.tensor([-0.5 + 3.0j, -2.0 - 1.0j, -0.01 + 40.0j, -1.5 + 0.0j], dtype=torch.complex128)
STEP = torch.tensor([0.1, 0.7, 0.003, 1.3], dtype=torch.float64)


def draw_ssm(channels=3, modes=5, dtype=torch.complex128):
    a = torch.polar(torch.rand(channels, modes).double() * 0.4 + 0.6, torch.randn(channels, modes).double() * 3)
    b, c = torch.randn(2, channels, modes, dtype=torch.complex128)
    return ChannelSSM(a.to(dtype), b.to(dtype), c.to(dtype))


def by_hand(x, ssm, h0):
    """One channel, one mode, one step at a time, in Python's own complex numbers."""
    a, b, c = (part.tolist() for part in ssm)
    y, last = torch.zeros_like(x), torch.zeros_like(h0)
    for row in range(x.shape[0]):
        for d in range(x.shape[2]):
            for n in range(len(a[d])):
                h = complex(h0[row, d, n])
                for t in range(x.shape[1]):
                    h = a[d][n] * h + b[d][n] * float(x[row, t, d])
                    y[row, t, d] += (c[d][n] * h).real
                last[row, d, n] = h
    return y, last


def with_gradients(run, x, ssm, h0):
    """Outputs and the gradients of a fixed random combination of them."""
    x, h0 = x.clone().requires_grad_(), h0.clone().requires_grad_()
    ssm = ChannelSSM(*(part.clone().requires_grad_() for part in ssm))
    y, last = run(x, ssm, h0)
    generator = torch.Generator().manual_seed(5)
    for_y, for_last = (torch.randn(out.shape, generator=generator, dtype=torch.complex128) for out in (y, last))
    value = (for_y.real.to(y.dtype) * y).sum() + (for_last.to(last.dtype) * last).sum().real
    return [y, last, *torch.autograd.grad(value, [x, h0, *ssm])]


# --- discretisation ---


def test_zero_order_hold_is_the_solution_for_a_constant_input():
    """d/dt (h, u) = ((lambda, 1), (0, 0)) (h, u): the exponential of that matrix holds a and the factor."""
    a, factor = zero_order_hold(EIGENVALUES, STEP)
    for i, (eigenvalue, step) in enumerate(zip(EIGENVALUES, STEP)):
        matrix = torch.tensor([[complex(eigenvalue), 1], [0, 0]], dtype=torch.complex128) * step
        exponential = torch.linalg.matrix_exp(matrix)
        torch.testing.assert_close(a[i], exponential[0, 0], rtol=1e-12, atol=0)
        torch.testing.assert_close(factor[i], exponential[0, 1], rtol=1e-12, atol=0)


def test_bilinear_is_the_trapezoidal_rule():
    a, factor = _bilinear(EIGENVALUES, STEP)
    h, u = torch.randn(2, 4, dtype=torch.complex128)
    after = a * h + factor * u
    torch.testing.assert_close(after - h, STEP * (EIGENVALUES * (h + after) / 2 + u), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", list(_DISCRETISATIONS))
def test_a_small_step_changes_little_and_float32_knows_by_how_much(name):
    """GateLoop (6): as the step goes to 0, a approaches 1 + step lambda and the factor approaches the step."""
    step = torch.full((4,), 1e-6, dtype=torch.float64)
    a, factor = _DISCRETISATIONS[name](EIGENVALUES, step)
    torch.testing.assert_close(a, 1 + step * EIGENVALUES, rtol=0, atol=1e-9)
    torch.testing.assert_close(factor, step.to(torch.complex128), rtol=1e-4, atol=0)
    single = _DISCRETISATIONS[name](EIGENVALUES.to(torch.complex64), step.float())
    torch.testing.assert_close(single.factor.to(torch.complex128), factor, rtol=1e-6, atol=0)


def test_steps_are_spaced_logarithmically_in_random_order():
    steps = log_spaced_steps(5, 0.001, 0.1).exp()
    expected = torch.tensor([0.001, 0.001 * 10**0.5, 0.01, 0.01 * 10**0.5, 0.1])
    torch.testing.assert_close(steps.sort().values, expected)
    assert any(not torch.equal(log_spaced_steps(5, 0.001, 0.1), steps.log()) for _ in range(4))
    assert not (log_spaced_steps(50, 0.001, 0.1).diff() > 0).all()


# --- one model per channel ---


@pytest.mark.parametrize("length", [1, 2, 5, 8, 17, 40])
@pytest.mark.parametrize("run", [run_channels, _run_channels_by_recurrence, _run_channels_by_convolution])
def test_channels_are_what_a_plain_loop_gives(run, length):
    ssm, x = draw_ssm(), torch.randn(2, length, 3, dtype=torch.float64)
    h0 = torch.randn(2, 3, 5, dtype=torch.complex128)
    require_near(run(x, ssm, h0), by_hand(x, ssm, h0), 1e-13)
    require_near(run(x, ssm), by_hand(x, ssm, torch.zeros_like(h0)), 1e-13)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 15, 16, 17, 63, 64, 65, 100, 257, 1000])
def test_convolution_and_recurrence_agree_with_all_gradients(length):
    ssm, x = draw_ssm(), torch.randn(2, length, 3, dtype=torch.float64)
    h0 = torch.randn(2, 3, 5, dtype=torch.complex128)
    expected = with_gradients(_run_channels_by_recurrence, x, ssm, h0)
    require_near(with_gradients(_run_channels_by_convolution, x, ssm, h0), expected, 1e-12)
    single = ChannelSSM(*(part.to(torch.complex64) for part in ssm))
    actual = with_gradients(_run_channels_by_convolution, x.float(), single, h0.to(torch.complex64))
    assert {tensor.dtype for tensor in actual} == {torch.float32, torch.complex64}
    require_near(actual, expected, 1e-5, mixed=True)


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 1e-30])
def test_special_transitions_are_exact_in_value_and_gradient(value):
    ssm = draw_ssm()._replace(a=torch.full((3, 5), value, dtype=torch.complex128))
    x, h0 = torch.randn(2, 33, 3, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.complex128)
    expected = with_gradients(_run_channels_by_recurrence, x, ssm, h0)
    require_near(with_gradients(_run_channels_by_convolution, x, ssm, h0), expected, 1e-13)


class Sizes(TorchDispatchMode):
    """Records the largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def test_the_convolution_never_holds_the_states_of_all_steps():
    ssm, x = draw_ssm(channels=2, modes=64), torch.randn(3, 1024, 2, dtype=torch.float64)
    h0 = torch.randn(3, 2, 64, dtype=torch.complex128)
    states = x.numel() * 64
    with Sizes() as by_convolution:
        with_gradients(_run_channels_by_convolution, x, ssm, h0)
    with Sizes() as by_recurrence:
        with_gradients(_run_channels_by_recurrence, x, ssm, h0)
    assert by_convolution.largest < states / 8
    assert by_recurrence.largest >= states  # the measurement works


def test_long_sequences_are_convolved_and_short_ones_step():
    ssm = draw_ssm(channels=2, modes=64)
    for length, holds_states in ((_SHORT - 1, True), (_SHORT, False)):
        x = torch.randn(50, length, 2, dtype=torch.float64)
        with Sizes() as sizes:
            run_channels(x, ssm)
        assert (sizes.largest >= x.numel() * 64) == holds_states


def test_autocast_leaves_the_model_in_float32():
    ssm, x = draw_ssm(dtype=torch.complex64), torch.randn(2, 50, 3)
    h0 = torch.randn(2, 3, 5, dtype=torch.complex64)
    expected = _run_channels_by_convolution(x, ssm, h0)
    with torch.autocast("cpu", torch.bfloat16):
        actual = _run_channels_by_convolution(x, ssm, h0)
    for one, other in zip(actual, expected):
        assert torch.equal(one, other)


# --- one model over all channels ---


def dense_model(n_modes=4, channels=3):
    a = torch.polar(torch.rand(n_modes).double(), torch.randn(n_modes).double() * 3)
    b = torch.randn(n_modes, channels, dtype=torch.complex128)
    return a, b, torch.randn(channels, n_modes, dtype=torch.complex128)


@pytest.mark.parametrize("length", [0, 1, 6])
def test_dense_is_what_a_plain_loop_gives(length):
    a, b, c = dense_model()
    x, h0 = torch.randn(2, length, 3, dtype=torch.float64), torch.randn(2, 4, dtype=torch.complex128)
    h, outputs = h0, []
    for t in range(length):
        h = torch.stack([torch.diag(a) @ h[row] + b @ x[row, t].to(b.dtype) for row in range(2)])
        outputs.append((h @ c.T).real)
    y, last = run_dense(x, a, b, c, h0)
    torch.testing.assert_close(last, h, rtol=1e-13, atol=1e-13)
    assert y.shape == x.shape
    if length:
        torch.testing.assert_close(y, torch.stack(outputs, 1), rtol=1e-13, atol=1e-13)


def test_dense_states_stay_float32_under_autocast_and_for_half_inputs():
    a, b, c = (part.to(torch.complex64) for part in dense_model())
    x, h0 = torch.randn(2, 6, 3), torch.zeros(2, 4, dtype=torch.complex64)
    expected = run_dense(x, a, b, c, h0)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = run_dense(x, a, b, c, h0)
    for y, last in (under_autocast, run_dense(x.bfloat16(), a, b, c, h0)):
        assert (y.dtype, last.dtype) == (torch.bfloat16, torch.complex64)
        torch.testing.assert_close(y.float(), expected[0], rtol=0.1, atol=0.1)
        torch.testing.assert_close(last, expected[1], rtol=0.1, atol=0.1)
