"""The fused GateLoop as a torch operator: its registration, the function transforms, the compiler."""

import pytest
import torch
from tests.gradients import differentiate
from torch.func import grad, jvp, vmap

from recurra import gate_loop
from recurra.ops.gate_loop.fused import Planes
from recurra.ops.gate_loop.operator import gate_loop_real_part


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


@pytest.mark.compile
@pytest.mark.parametrize(
    ("mode", "compiler"),
    # Inductor has no code for complex numbers: modes in plain torch only go through the tracer
    [
        ("fused", "aot_eager"),
        pytest.param("fused", "inductor", marks=pytest.mark.slow),
        ("scan", "aot_eager"),
        pytest.param("scan", "inductor", marks=pytest.mark.slow),
        pytest.param("recurrent", "aot_eager", marks=pytest.mark.slow),
        pytest.param("attention", "aot_eager", marks=pytest.mark.slow),
    ],
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
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_of_the_real_part_in_bfloat16(compiler):
    def function(q, k, v, a_re, a_im, state):
        return gate_loop_real_part(q * 2, k, v, Planes(a_re.sigmoid(), a_im), state=state)

    q, k, v = torch.randn(3, 2, 9, 5, 1).bfloat16()
    inputs = (q, k, v, *(0.3 * torch.randn(2, 2, 9, 5, 1)), torch.randn(2, 5, 1, 1, dtype=torch.complex64))
    compiled = torch.compile(function, fullgraph=True, backend=compiler)
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
