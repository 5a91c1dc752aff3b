"""The fused kernels of the max-headed GateLoop: exact rounding, layouts, the states that are kept, derivatives."""

import itertools

import pytest
import torch
from tests.gradients import differentiate, require_near
from torch.autograd import gradcheck, gradgradcheck

from recurra import gate_loop
from recurra.ops.gate_loop.fused import Planes, fused
from recurra.ops.gate_loop.operator import gate_loop_real_part

ODD_SIZES = (1, 2, 3, 15, 16, 17, 31, 33, 63, 65, 100)
KINDS = ("real", "complex")


def draw(batch, length, channels, kind, number=torch.float64, plane=torch.float64):
    """q, k, v, the planes of a and those of the state."""
    q, k, v = torch.randn(3, batch, length, channels, dtype=torch.float64).to(number)
    a = Planes(*(torch.randn(2, batch, length, channels, dtype=torch.float64) * 0.5).to(plane))
    state = Planes(*torch.randn(2, batch, channels, dtype=torch.float64).to(plane))
    if kind == "real":
        a, state = Planes(a.re, None), Planes(state.re, None)
    return q, k, v, a, state


def flatten(q, k, v, a, state):
    return [x for x in (q, k, v, *a, *state) if x is not None]


def unflatten(tensors):
    if len(tensors) == 5:
        return *tensors[:3], Planes(tensors[3], None), Planes(tensors[4], None)
    return *tensors[:3], Planes(*tensors[3:5]), Planes(*tensors[5:])


def outputs_of(result):
    return [x for x in (result.y, *result.states, *result.last) if x is not None]


def run(arguments, backend, chosen=None):
    return differentiate(lambda *x: outputs_of(fused(*unflatten(x), backend=backend)), flatten(*arguments), chosen)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", ODD_SIZES)
def test_odd_sizes(channels, kind):
    for batch, length, dtype in itertools.product((1, 3), (1, 2, 9), (torch.float32, torch.float64)):
        arguments = draw(batch, length, channels, kind, dtype, dtype)
        numba, reference = (run(arguments, backend) for backend in ("numba", "reference"))
        require_near(numba, reference, 1e-13 if dtype == torch.float64 else 1e-5)
        if kind == "real":
            assert torch.equal(numba[0], reference[0])
            assert torch.equal(numba[1], reference[1])


def run_complex(inputs, chosen, backend):
    return differentiate(lambda *x: gate_loop(*x[:4], state=x[4], mode="fused", backend=backend), inputs, chosen)


@pytest.mark.parametrize("channels", ODD_SIZES)
def test_complex_outputs_at_odd_sizes(channels):
    for batch, length, dtype in itertools.product((1, 3), (1, 2, 9), (torch.float32, torch.float64)):
        q, k, v = torch.randn(3, batch, length, channels, 1, dtype=torch.float64).to(dtype)
        a = torch.randn(batch, length, channels, 1, dtype=torch.complex128).to(dtype.to_complex()) / 2
        inputs = q, k, v, a, torch.randn(batch, channels, 1, 1, dtype=dtype.to_complex())
        for chosen in ([0], [1], [0, 1]):
            numba, reference = (run_complex(inputs, chosen, backend) for backend in ("auto", "reference"))
            require_near(numba, reference, 1e-13 if dtype == torch.float64 else 1e-5)
        with torch.no_grad():  # which keeps no states
            y, last = gate_loop(*inputs[:4], state=inputs[4])
        assert torch.equal(y, numba[0])
        assert torch.equal(last, numba[1])


def test_complex_outputs_of_any_layout():
    q, k, v, a = torch.randn(4, 2, 7, 20, 1, 2).unbind()
    a, state = torch.view_as_complex(a / 2).conj(), torch.randn(2, 20, 1, 1, dtype=torch.cfloat).conj()
    inputs = q[..., 0], k[..., 1], v[:1, ..., 0].expand(2, 7, 20, 1), a, state
    dense = [x.resolve_conj().contiguous() for x in inputs]
    require_near(run_complex(inputs, [0, 1], "auto"), run_complex(dense, [0, 1], "reference"), 1e-5)


def test_second_derivatives_of_complex_outputs():
    q, k, v = torch.randn(3, 1, 3, 2, 1, dtype=torch.float64, requires_grad=True)
    a, state = (torch.randn(*n, dtype=torch.complex128, requires_grad=True) for n in ((1, 3, 2, 1), (1, 2, 1, 1)))
    function = lambda q, k, v, a, state: gate_loop(q, k, v, a, state=state, mode="fused")  # noqa: E731
    assert gradgradcheck(function, (q, k, v, a, state))


@pytest.mark.parametrize("kind", KINDS)
def test_every_combination_of_outputs_sends_its_gradient_back(kind):
    """y, the states and the last state, each alone and together; the others have no gradient."""
    arguments = draw(2, 5, 19, kind)
    n = len(run(arguments, "reference")) - len(flatten(*arguments))
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(n), k) for k in range(1, n + 1)):
        require_near(run(arguments, "numba", chosen), run(arguments, "reference", chosen), 1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_by_differences(kind):
    inputs = [x.requires_grad_() for x in flatten(*draw(2, 3, 2, kind))]
    function = lambda *x: tuple(outputs_of(fused(*unflatten(x), backend="numba")))  # noqa: E731
    assert gradcheck(function, inputs)
    inputs = [x.requires_grad_() for x in flatten(*draw(1, 2, 2, kind))]
    assert gradgradcheck(function, inputs)


def test_higher_derivatives_where_one_input_is_another_or_comes_from_it():
    """Each argument must get its own share: x is q and k, v comes from k, the state from both."""

    def derivatives(backend):
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(1, 4, 3).requires_grad_()
        a = Planes(torch.sigmoid(x), None)
        result = fused(x, x, 2 * x, a, Planes(x[:, 0] * x[:, 1], None), backend=backend)
        (first,) = torch.autograd.grad(result.y.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return [first.detach(), second]

    require_near(derivatives("numba"), derivatives("reference"), 1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_float32_rounded_at_the_end(kind):
    """q, k, v, y and their gradients are bfloat16; everything between is computed in float32."""
    for channels in (1, 17, 65):
        narrow = draw(2, 9, channels, kind, torch.bfloat16, torch.float32)
        wide = [x.float() for x in flatten(*narrow)]
        results = []
        for inputs in (flatten(*narrow), wide):
            inputs = [x.detach().requires_grad_() for x in inputs]
            result = fused(*unflatten(inputs), backend="numba")
            generator = torch.Generator().manual_seed(1)
            dy = torch.randn(result.y.shape, generator=generator).bfloat16().to(result.y.dtype)
            d_last = [torch.randn(result.last.re.shape, generator=generator) for x in result.last if x is not None]
            outputs = [result.y, *(x for x in result.last if x is not None)]
            results.append([*outputs, *torch.autograd.grad(outputs, inputs, [dy, *d_last])])
        for mine, right in zip(*results, strict=True):
            assert torch.equal(mine, right.to(mine.dtype))
        types = [x.dtype for x in results[0]]
        planes = 2 if kind == "complex" else 1
        assert (
            types == [torch.bfloat16] + [torch.float32] * planes + [torch.bfloat16] * 3 + [torch.float32] * 2 * planes
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_without_a_gradient_only_the_last_state_is_kept(kind, number):
    plane = torch.promote_types(number, torch.float32)
    arguments = draw(2, 7, 33, kind, number, plane)
    recorded = fused(*[x.requires_grad_() for x in arguments[:3]], *arguments[3:], backend="numba")
    assert recorded.states.re.shape == (2, 7, 33)
    with torch.no_grad():
        lean, full = (fused(*arguments, backend="numba", keep_states=keep) for keep in (False, True))
    for result in (lean, full):
        assert torch.equal(result.y, recorded.y)
        assert torch.equal(result.last.re, recorded.last.re)
        assert kind == "real" or torch.equal(result.last.im, recorded.last.im)
    assert lean.states.re.shape == (2, 1, 33)
    assert torch.equal(full.states.re, recorded.states.re)
    if kind == "complex":
        assert torch.equal(full.states.im, recorded.states.im)
    else:
        assert full.states.im is lean.states.im is recorded.states.im is None
    detached = [x.detach() for x in flatten(*arguments)]
    assert torch.equal(fused(*unflatten(detached), backend="numba").y, recorded.y)
    assert torch.equal(full.last.re, full.states.re[:, -1])


def _layouts(x):
    """The numbers of (B, L, D) or (B, D) in other memory layouts."""
    gaps = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    gaps[..., ::2] = x
    yield gaps[..., ::2]
    yield x.transpose(0, 1).contiguous().transpose(0, 1)
    yield x.transpose(0, -1).contiguous().transpose(0, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_layouts(kind):
    arguments = draw(2, 5, 19, kind)
    straight, expected = flatten(*arguments), run(arguments, "reference")
    for place in range(len(straight)):
        for other in _layouts(straight[place]):
            assert not other.is_contiguous()
            inputs = [*straight[:place], other, *straight[place + 1 :]]
            require_near(run(unflatten(inputs), "numba"), expected, 1e-13)
    turned = [list(_layouts(x))[2] for x in straight]
    require_near(run(unflatten(turned), "numba"), expected, 1e-13)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_every_element_is_written(kind, number):
    plane = torch.promote_types(number, torch.float32)
    for batch, length, channels in ((1, 1, 1), (2, 3, 15), (3, 2, 67)):
        arguments = draw(batch, length, channels, kind, number, plane)
        n = 3 if kind == "real" else 5
        for chosen in (None, [0], [n - 1]):
            assert all(x.isfinite().all() for x in run(arguments, "numba", chosen))
        with torch.no_grad():
            assert all(x.isfinite().all() for x in outputs_of(fused(*arguments, backend="numba")))


def test_nan_and_infinity_travel_as_in_the_reference():
    special = torch.tensor([0.0, 1.0, -2.0, torch.inf, torch.nan, 1e-30, -1e30])
    pick = lambda *shape: special[torch.randint(len(special), shape)]  # noqa: E731
    q, k, v, a = (pick(2, 4, 37) for _ in range(4))
    state = Planes(pick(2, 37), None)
    results = [fused(q, k, v, Planes(a, None), state, backend=b) for b in ("numba", "reference")]
    assert 0 < results[1].y.isnan().sum() < results[1].y.numel()
    torch.testing.assert_close(results[0].y, results[1].y, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(results[0].last.re, results[1].last.re, rtol=0, atol=0, equal_nan=True)


# ---- gate_loop_real_part ---------------------------------------------------------------------------------------------


def test_the_real_part_is_that_of_the_whole(real_case):
    inputs = real_case.draw(11)
    a = Planes(inputs.a.real, inputs.a.imag) if inputs.a.is_complex() else Planes(inputs.a, None)
    for backend in ("auto", "reference"):
        y, last = gate_loop_real_part(*inputs[:3], a, state=inputs.state, backend=backend)
        expected, expected_last = gate_loop(*inputs[:4], state=inputs.state, mode="recurrent")
        assert not y.is_complex()
        torch.testing.assert_close(y, expected.real, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(last, expected_last, rtol=1e-12, atol=1e-12)


def test_the_real_part_takes_bfloat16_as_it_comes():
    """Under autocast q, k, v are bfloat16 and the transitions float32: only the result is rounded."""
    q, k, v = torch.randn(3, 2, 30, 7, 1).bfloat16()
    a = Planes(*(torch.randn(2, 2, 30, 7, 1) * 0.6))
    state = torch.randn(2, 7, 1, 1, dtype=torch.complex64)
    y, last = gate_loop_real_part(q, k, v, a, state=state)
    wide, wide_last = gate_loop_real_part(q.float(), k.float(), v.float(), a, state=state)
    assert (y.dtype, last.dtype) == (torch.bfloat16, torch.complex64)
    assert torch.equal(y, wide.bfloat16())
    assert torch.equal(last, wide_last)
    reference, _ = gate_loop_real_part(q, k, v, a, state=state, backend="reference")
    torch.testing.assert_close(y.float(), reference.float(), rtol=2**-7, atol=1e-5)
    double, _ = gate_loop(*(x.double() for x in (q, k, v)), torch.complex(*a), state=state, mode="recurrent")
    torch.testing.assert_close(y.double(), double.real, rtol=2**-8, atol=1e-5)


def test_the_real_part_of_nothing():
    for shape in ((0, 4, 3, 1), (2, 0, 3, 1), (2, 4, 0, 1)):
        q = torch.ones(shape).bfloat16()
        state = torch.zeros(shape[0], shape[2], 1, 1)
        y, last = gate_loop_real_part(q, q, q, Planes(torch.ones(shape), None), state=state)
        assert (y.shape, y.dtype, last.shape) == (shape, torch.bfloat16, state.shape)


@pytest.mark.parametrize("number", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_gradient_nothing_changes(kind, number):
    """Neither in the outputs, of any length and layout, nor in a state that is a lazy conjugate."""
    plane = torch.float64 if number == torch.float64 else torch.float32
    for length, channels in itertools.product((1, 5), (1, 3, 17, 70)):
        q, k, v, a, state = draw(2, length, channels, kind, number, plane)
        q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1).unsqueeze(-1) for x in (q, k, v))
        a = Planes(*(x if x is None else x.flip(1)[..., None].repeat(1, 1, 1, 2)[..., :1] for x in a))
        h = state.re if state.im is None else torch.complex(*state)
        for entering in (h, h.conj()):
            entering = entering[..., None, None]
            y, last = gate_loop_real_part(q, k, v, a, state=entering)
            recorded = gate_loop_real_part(q.requires_grad_(), k, v, a, state=entering)
            q = q.detach()
            assert y.is_contiguous()
            assert last.shape == entering.shape
            torch.testing.assert_close((y, last), tuple(x.detach() for x in recorded), rtol=0, atol=0)


def test_without_a_gradient_planes_of_two_types_are_one():
    q, k, v, a, state = draw(2, 5, 3, "complex", torch.float32, torch.float32)
    q, k, v, re, im = (x.unsqueeze(-1) for x in (q, k, v, *a))
    h = torch.complex(*state)[..., None, None]
    expected = gate_loop_real_part(q, k, v, Planes(re, im), state=h)
    torch.testing.assert_close(gate_loop_real_part(q, k, v, Planes(re, im.double()), state=h), expected, rtol=0, atol=0)


def test_under_a_transform_the_last_complex_state_keeps_no_others():
    q = torch.randn(3, 1, 40, 2, 1)
    a = torch.polar(torch.rand_like(q), q)
    _, last = torch.func.vmap(lambda q, a: gate_loop(q, q, q, a))(q, a)
    assert last.untyped_storage().nbytes() == last.nbytes
