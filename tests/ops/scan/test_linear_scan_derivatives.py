"""Derivatives of the linear recurrence: against the chain rule written as a loop, and against differences."""

import itertools

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from recurra import gate_loop, linear_scan

BACKENDS = ("reference", "numba")
FULL_TYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
SHAPES = ((1, 1, 1), (2, 2, 3), (3, 5, 15), (1, 17, 17), (2, 3, 33), (2, 7, 65), (3, 2, 100))
WIDE = (torch.float64, torch.complex128)
THROUGH = {"all states": lambda h: h, "the last state": lambda h: h[:, -1], "one step": lambda h: h[:, h.shape[1] // 2]}


def plain_gradients(a, b, h0, dh, reverse):
    """The chain rule on full-size double precision tensors: g_t = dh_t + conj(a_{t+1}) g_{t+1}, one step at a time."""
    steps = list(range(b.shape[1]))[:: -1 if reverse else 1]
    states, h = {}, h0
    for t in steps:
        states[t] = h  # the state that enters step t
        h = a[:, t] * h + b[:, t]
    da, db, g = torch.zeros_like(a), torch.zeros_like(b), torch.zeros_like(h0)
    for t in steps[::-1]:
        db[:, t] = g + dh[:, t]
        da[:, t] = db[:, t] * states[t].conj()
        g = a[:, t].conj() * db[:, t]
    return da, db, g


def shapes_of(dtype):
    """Every width is a kernel. Of complex numbers, rows of 17 are as wide as those of 34 real ones."""
    return [shape for shape in SHAPES if not (dtype.is_complex and shape[2] in (15, 33))]


def distance(actual, expected):
    """The largest difference, relative to the largest number."""
    return ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-300)).item()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", FULL_TYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_at_odd_sizes(backend, dtype, reverse, gates):
    tolerance = 1e-10 if dtype in (torch.float64, torch.complex128) else 1e-5
    wide = torch.promote_types(dtype, torch.float64)
    for shape, (name, through) in itertools.product(shapes_of(dtype), THROUGH.items()):
        a = gates(*shape, dtype=dtype, requires_grad=True)
        b = torch.randn(shape, dtype=dtype, requires_grad=True)
        h0 = torch.randn(shape[0], shape[2], dtype=dtype, requires_grad=True)
        part = through(linear_scan(a, b, h0, reverse=reverse, backend=backend))
        d_part = torch.randn(part.shape, dtype=dtype)
        actual = torch.autograd.grad(part, (a, b, h0), d_part)

        all_states = torch.zeros(shape, dtype=wide, requires_grad=True)
        (dh,) = torch.autograd.grad(through(all_states), all_states, d_part.to(wide))
        expected = plain_gradients(*(x.detach().to(wide) for x in (a, b, h0)), dh, reverse)
        for which, mine, right in zip(("a", "b", "h0"), actual, expected):
            assert distance(mine, right) < tolerance, f"d{which} of {shape} through {name}"


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_real_gradients_equal_those_of_the_reference_bit_for_bit(dtype, reverse):
    for shape in SHAPES:
        inputs = [torch.randn(s, dtype=dtype, requires_grad=True) for s in (shape, shape, (shape[0], shape[2]))]
        dh = torch.randn(shape, dtype=dtype)
        numba, reference = (
            torch.autograd.grad(linear_scan(*inputs, reverse=reverse, backend=name), inputs, dh)
            for name in BACKENDS[::-1]
        )
        for which, mine, right in zip(("a", "b", "h0"), numba, reference):
            assert torch.equal(mine, right), f"d{which} of {shape}"


def _require_derivatives(a_shape, a_type, b_shape, b_type, gates, backend="numba", reverse=False):
    a, b = gates(*a_shape, dtype=a_type, requires_grad=True), torch.randn(b_shape, dtype=b_type, requires_grad=True)
    h0 = torch.randn(b_shape[0], b_shape[2], dtype=torch.float64, requires_grad=True)
    assert gradcheck(
        lambda a, b, h0: linear_scan(a, b, h0, reverse=reverse, backend=backend),
        (a, b, h0),
        check_forward_ad=True,
        check_batched_grad=True,
    )


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("b_type", WIDE, ids=str)
@pytest.mark.parametrize("a_type", WIDE, ids=str)
def test_first_derivatives_by_differences(a_type, b_type, backend, reverse, gates):
    """Any mix of real and complex; the gradient of a real input must come out real."""
    _require_derivatives((1, 3, 2), a_type, (1, 3, 2), b_type, gates, backend, reverse)


@pytest.mark.parametrize(
    ("a_shape", "a_type", "b_type"),
    [
        (shape, *(WIDE if n % 2 else WIDE[::-1]))  # which numbers are complex has nothing to do with the shape
        for n, shape in enumerate([(), (2,), (3, 2), (2, 1, 2), (2, 3, 1), (1, 1, 1)])
    ],
    ids=str,
)
def test_first_derivatives_of_any_shape_of_a_by_differences(a_shape, a_type, b_type, gates):
    """`a` is expanded before it comes to a backend, whichever that is and in whichever direction it runs."""
    _require_derivatives(a_shape, a_type, (2, 3, 2), b_type, gates)


@pytest.mark.parametrize(
    ("shape", "dtype", "backend"),
    [
        *itertools.product([(1, 1, 1), (2, 2, 1), (1, 3, 1)], WIDE, BACKENDS),
        ((1, 2, 1, 2), torch.complex128, "numba"),  # channels, which become one dimension before they reach a backend
    ],
    ids=str,
)
def test_second_derivatives_by_differences(shape, dtype, backend, gates):
    a, b = gates(*shape, dtype=dtype, requires_grad=True), torch.randn(shape, dtype=dtype, requires_grad=True)
    h0 = torch.randn(shape[:1] + shape[2:], dtype=dtype, requires_grad=True)
    for reverse in (False, True) if shape[1] == 3 else (False,):  # the direction is the order of the steps
        scan = lambda a, b, h0, reverse=reverse: linear_scan(a, b, h0, reverse=reverse, backend=backend)  # noqa: E731
        assert gradcheck(scan, (a, b, h0))
        assert gradgradcheck(scan, (a, b, h0), check_fwd_over_rev=True)


def test_nan_and_infinity_in_gradients_are_those_of_the_reference():
    special = torch.tensor([0.0, 1.0, -2.0, torch.inf, -torch.inf, torch.nan, 1e-30, -1e30])
    draw = lambda *shape: special[torch.randint(len(special), shape)].requires_grad_()  # noqa: E731
    for reverse in (False, True):
        inputs, dh = (draw(3, 4, 37), draw(3, 4, 37), draw(3, 37)), draw(3, 4, 37).detach()
        numba, reference = (
            torch.autograd.grad(linear_scan(*inputs, reverse=reverse, backend=name), inputs, dh)
            for name in BACKENDS[::-1]
        )
        for mine, right in zip(numba, reference):
            assert right.isnan().any()
            assert not right.isnan().all()
            torch.testing.assert_close(mine, right, rtol=0, atol=0, equal_nan=True)


def _layouts(tensor):
    """The numbers of a (B, L, D) tensor in other memory layouts."""
    batch, length, channels = tensor.shape
    every_other = torch.zeros(batch, length, 2 * channels, dtype=tensor.dtype)
    every_other[..., ::2] = tensor
    yield tensor.transpose(1, 2).contiguous().transpose(1, 2)
    yield tensor.transpose(0, 1).contiguous().transpose(0, 1)
    yield every_other[..., ::2]
    if tensor.is_complex():
        yield tensor.conj().clone().conj()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_memory_layouts_of_inputs_and_incoming_gradients(dtype, gates):
    a, b, dh = gates(2, 5, 19, dtype=dtype), *torch.randn(2, 2, 5, 19, dtype=dtype)
    h0 = torch.randn(2, 19, dtype=dtype)
    for reverse in (False, True):
        expected = plain_gradients(a, b, h0, dh, reverse)
        for a_, b_, dh_ in itertools.product(*map(_layouts, (a, b, dh))):
            inputs = [x.detach().requires_grad_() for x in (a_, b_, h0)]
            h = linear_scan(*inputs, reverse=reverse, backend="numba")
            for mine, right in zip(torch.autograd.grad(h, inputs, dh_), expected):
                assert distance(mine, right) < 1e-13


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", FULL_TYPES, ids=str)
def test_every_element_of_every_gradient_is_written(dtype, gates):
    for shape, reverse in itertools.product(shapes_of(dtype), (False, True)):
        a, b = gates(*shape, dtype=dtype, requires_grad=True), torch.randn(shape, dtype=dtype, requires_grad=True)
        h0 = torch.randn(shape[0], shape[2], dtype=dtype, requires_grad=True)
        h = linear_scan(a, b, h0, reverse=reverse, backend="numba")
        for gradient in torch.autograd.grad(h.abs().sum(), (a, b, h0)):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("trains", [False, True])
def test_a_tensor_that_outlived_its_transform_is_taken(trains):
    kept = []
    torch.func.grad(lambda x: (kept.append(2 * x), x.sum())[1])(torch.rand(2, 5, 3))
    a = torch.rand(2, 5, 3, requires_grad=trains)
    (b,) = kept
    plain = torch.tensor(b.tolist())
    assert torch.equal(linear_scan(a, b), linear_scan(a, plain))
    assert torch.equal(
        gate_loop(*[a[..., None]] * 4, state=b[:, 0, :, None, None])[0],
        gate_loop(*[a[..., None]] * 4, state=plain[:, 0, :, None, None])[0],
    )
