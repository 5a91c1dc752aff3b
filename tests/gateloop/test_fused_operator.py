"""The fused GateLoop as a torch operator: its registration, the function transforms, the compiler."""

import pytest
import torch
from torch.func import grad, jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

from recurra import create_mixer, gate_loop
from recurra.gateloop import Planes, gate_loop_real_part
from recurra.gateloop.fused import fused, fused_reference

KINDS = ("real", "complex")


def draw(batch, length, channels, kind, number=torch.float64, plane=torch.float64):
    """q, k, v, the planes of a and those of the state."""
    q, k, v = torch.randn(3, batch, length, channels, dtype=torch.float64).to(number)
    a = Planes(*(torch.randn(2, batch, length, channels, dtype=torch.float64) * 0.5).to(plane))
    state = Planes(*torch.randn(2, batch, channels, dtype=torch.float64).to(plane))
    if kind == "real":
        a, state = Planes(a.re, None), Planes(state.re, None)
    return q, k, v, a, state


@pytest.mark.parametrize(("kind", "number"), [("real", torch.float32), ("complex", torch.bfloat16)], ids=str)
def test_opcheck(kind, number):
    q, k, v, a, state = draw(2, 5, 7, kind, number, torch.float32)
    for keep in (False, True):
        arguments = (q, k, v, a.re, a.im, state.re, state.im, keep)
        torch.library.opcheck(torch.ops.recurra.gate_loop_fused.default, arguments)
    _, h_re, h_im = torch.ops.recurra.gate_loop_fused(*arguments)
    incoming = [(q, a.re, a.im, state.re, state.im), (None, None, None, state.re, None)]
    for gradients in incoming:
        torch.library.opcheck(
            torch.ops.recurra.gate_loop_fused_backward.default, (*gradients, *arguments[:-1], h_re, h_im)
        )


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bare_operator_records_a_gradient(kind, keep):
    """As in a program of torch.export, which may run with gradients on."""
    q, k, v, a, state = draw(2, 5, 3, kind)
    inputs = [None if x is None else x.requires_grad_() for x in (q, k, v, a.re, a.im, state.re, state.im)]
    y, h_re, h_im = torch.ops.recurra.gate_loop_fused(*inputs, keep)
    expected = fused_reference(q, k, v, a, state)
    torch.testing.assert_close(y, expected.y)
    planes = [h_re] if kind == "real" else [h_re, h_im]
    gradients = []
    for outputs in ([y, *planes], [expected.y, *(x if keep else x[:, -1:] for x in expected.states if x is not None)]):
        value = sum((i * x).square().sum() for i, x in enumerate(outputs, 1))
        gradients.append(torch.autograd.grad(value, [x for x in inputs if x is not None]))
    torch.testing.assert_close(*gradients)


def test_the_bare_operators_refuse_rather_than_lose_a_derivative():
    q, k, v, a, state = draw(2, 5, 3, "real")
    function = lambda q: torch.ops.recurra.gate_loop_fused(q, k, v, a.re, None, state.re, None, True)[0]  # noqa: E731
    with pytest.raises(NotImplementedError, match="no derivative"):
        jvp(function, (q,), (q,))


def test_flops():
    for kind, forward, backward in (("real", 4, 8), ("complex", 9, 19)):
        q, *others = draw(2, 5, 7, kind)
        with FlopCounterMode(display=False) as counted_forward:
            y = fused(q.requires_grad_(), *others, backend="numba").y
        with FlopCounterMode(display=False) as counted_backward:
            y.sum().backward()
        assert counted_forward.get_total_flops() == 70 * forward
        assert counted_backward.get_total_flops() == 70 * backward


def test_transforms_are_right():
    x = torch.randn(2, 5, 3, 1, dtype=torch.float64)
    gate = torch.sigmoid(torch.randn_like(x))

    def function(mode):
        return lambda x: gate_loop(x, x, 2 * x, gate * x, mode=mode)[0].square().sum()

    for transform in (grad, lambda f: grad(lambda x: grad(f)(x).square().sum())):
        torch.testing.assert_close(
            transform(function("fused"))(x), transform(function("recurrent"))(x), rtol=1e-10, atol=1e-10
        )
    for transform in (lambda f: vmap(f)(torch.stack([x, -x])), lambda f: jvp(f, (x,), (x,))):
        torch.testing.assert_close(
            transform(function("fused")), transform(function("recurrent")), rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("name", ["gateloop", "hgrn2", "mamba"])
def test_a_batch_of_gradients(name):
    options = {"hgrn2": {"n_heads": 8}}.get(name, {})  # one channel a head, and real gates
    layer, x = create_mixer(name, 8, **options), torch.randn(1, 5, 8, requires_grad=True)
    y, _ = layer(x)
    backward = lambda gradient: torch.autograd.grad(y, x, gradient, retain_graph=True)[0]  # noqa: E731
    several = torch.randn(3, *y.shape)
    expected = torch.stack([backward(gradient) for gradient in several])
    torch.testing.assert_close(vmap(backward)(several), expected, rtol=1e-4, atol=1e-5)


def differentiate(function, inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    value = sum(x.abs().square().sum() for x in outputs)
    return [*outputs, *torch.autograd.grad(value, inputs)]


@pytest.mark.compile
@pytest.mark.parametrize(
    ("mode", "compiler"),
    # Inductor has no code for complex numbers: modes in plain torch only go through the tracer
    [("fused", "inductor"), ("scan", "inductor"), ("recurrent", "aot_eager"), ("attention", "aot_eager")],
)
def test_compile_equals_eager(mode, compiler):
    def function(q, k, v, a_re, a_im, state):
        return gate_loop(q, k, v, torch.complex(a_re, a_im), state=state, mode=mode)

    q, k, v, re, im = 0.5 * torch.randn(5, 2, 4, 3, 1, dtype=torch.float64)
    state = torch.randn(2, 3, 1, 1, dtype=torch.complex128)
    compiled = torch.compile(function, fullgraph=True, backend=compiler)
    expected = differentiate(function, (q, k, v, re, im, state))
    torch.testing.assert_close(differentiate(compiled, (q, k, v, re, im, state)), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.compile
def test_compile_of_the_real_part_in_bfloat16():
    def function(q, k, v, a_re, a_im, state):
        return gate_loop_real_part(q * 2, k, v, Planes(a_re.sigmoid(), a_im), state=state)

    q, k, v = torch.randn(3, 2, 9, 5, 1).bfloat16()
    inputs = (q, k, v, *(0.3 * torch.randn(2, 2, 9, 5, 1)), torch.randn(2, 5, 1, 1, dtype=torch.complex64))
    compiled = torch.compile(function, fullgraph=True)
    expected = differentiate(function, inputs)
    actual = differentiate(compiled, inputs)
    assert [x.dtype for x in actual] == [x.dtype for x in expected]
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.compile
def test_compiled_forward_derivatives_raise():
    x = torch.randn(2, 5, 3, 1, dtype=torch.float64)
    function = lambda: jvp(lambda a: gate_loop(x, x, x, a, mode="fused")[0], (x,), (x,))  # noqa: E731
    with pytest.raises(torch._dynamo.exc.Unsupported, match="no derivative"):
        torch.compile(function, fullgraph=True, backend="eager")()
