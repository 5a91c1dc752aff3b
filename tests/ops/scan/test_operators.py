"""The scan as a torch operator: its registration, the compiler, the function transforms."""

import itertools
import warnings

import pytest
import torch
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

from recurra import linear_scan

BACKENDS = ("reference", "numba")
FULL_TYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def draw(*shape, dtype=torch.float64, requires_grad=False):
    return torch.randn(shape, dtype=dtype).mul(0.6).requires_grad_(requires_grad)


def scan_of(backend, reverse=False):
    return lambda a, b, h0: linear_scan(a, b, h0, reverse=reverse, backend=backend)


def assert_equal_trees(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_first_gradients_go_through_one_backward_operator():
    """Not through a second differentiable scan, which would cost several passes over memory."""
    seen = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "recurra":
                seen.append(function.__name__)
            return function(*args, **(kwargs or {}))

    with Recorder():
        linear_scan(draw(2, 5, 3, requires_grad=True), draw(2, 5, 3)).sum().backward()
    assert seen == ["linear_scan.default", "linear_scan_backward.default"]


# ---- the function transforms -----------------------------------------------------------------------------------------

TRANSFORMS = {
    "grad": lambda f, x: grad(lambda *x: f(*x).abs().square().sum(), (0, 1, 2))(*x),
    "vjp": lambda f, x: vjp(f, *x)[1](torch.ones_like(f(*x))),
    "jacrev": lambda f, x: jacrev(f, (0, 1, 2))(*x),
    "jacfwd": lambda f, x: jacfwd(f, (0, 1, 2))(*x),
    "jvp": lambda f, x: jvp(f, x, tuple(t.flip(-1) * 0.7 for t in x)),
    "jvp of a alone": lambda f, x: jvp(lambda a: f(a, *x[1:]), x[:1], x[:1]),
    "jvp of b alone": lambda f, x: jvp(lambda b: f(x[0], b, x[2]), x[1:2], x[1:2]),
    "jvp of h0 alone": lambda f, x: jvp(lambda h0: f(*x[:2], h0), x[2:], x[2:]),
    "jvp of jvp": lambda f, x: jvp(lambda *y: jvp(f, y, x)[1], x, x),
    "jvp of jvp of jvp": lambda f, x: jvp(
        lambda *y: jvp(lambda *y: jvp(lambda a, *r: f(a * a, *r), y, x)[1], y, x)[1], x, x
    ),
    "grad of grad": lambda f, x: grad(lambda a: grad(lambda a: f(a, *x[1:]).pow(3).abs().sum())(a).abs().sum())(x[0]),
    "jvp of grad": lambda f, x: jvp(grad(lambda a: f(a, *x[1:]).abs().pow(3).sum()), x[:1], x[:1]),
    "grad of jvp": lambda f, x: grad(lambda a: jvp(lambda a: f(a, *x[1:]), (a,), x[:1])[1].abs().square().sum())(x[0]),
}


FOR_REAL_NUMBERS = ("jacrev", "jacfwd")  # as torch.func has it


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, torch.float64) for n in TRANSFORMS] + [(n, torch.complex128) for n in TRANSFORMS if n not in FOR_REAL_NUMBERS],
    ids=str,
)
def test_transforms_agree_with_the_reference(name, dtype, reverse):
    x = draw(2, 4, 3, dtype=dtype), draw(2, 4, 3, dtype=dtype), draw(2, 3, dtype=dtype)
    mine, right = (TRANSFORMS[name](scan_of(backend, reverse), x) for backend in ("numba", "reference"))
    assert_equal_trees(mine, right)
    assert any(t.count_nonzero() for t in torch.utils._pytree.tree_leaves(mine))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("in_dims", list(itertools.product((None, 0, -1, 1), repeat=3))[1:], ids=str)
def test_vmap_is_a_loop(in_dims, dtype):
    batch, shapes = 5, ((2, 4, 3), (2, 4, 3), (2, 3))
    inputs = []
    for dim, shape in zip(in_dims, shapes):
        x = draw(*shape, dtype=dtype) if dim is None else draw(batch, *shape, dtype=dtype).movedim(0, dim)
        inputs.append(x)
    mapped = vmap(scan_of("numba"), in_dims)(*inputs)
    for i in range(batch):
        here = [x if dim is None else x.select(dim, i) for x, dim in zip(inputs, in_dims)]
        assert_equal_trees(mapped[i], linear_scan(*here, backend="reference"))


def test_vmap_meets_the_other_transforms():
    a, b, h0 = draw(5, 2, 4, 3), draw(2, 4, 3), draw(5, 2, 3)
    for transform in (
        lambda f: vmap(grad(lambda a, h0: f(a, b, h0).square().sum()))(a, h0),
        lambda f: grad(lambda a: vmap(lambda a, h0: f(a, b, h0))(a, h0).square().sum())(a),
        lambda f: vmap(vmap(lambda a, h0: f(a, b[:1], h0)[0], (0, 0)))(a.unsqueeze(2), h0.unsqueeze(2)),
        lambda f: vmap(lambda a: jvp(lambda h0: f(a, b, h0), (h0[0],), (h0[1],))[1])(a),
        lambda f: jvp(lambda a: vmap(lambda a, h0: f(a, b, h0))(a, h0), (a,), (a,)),
        lambda f: vmap(lambda a: linear_scan(a, b.flatten(0, 1)[None], reverse=True))(a.flatten(1, 2)[:, None]),
    ):
        assert_equal_trees(transform(scan_of("numba")), transform(scan_of("reference")))


def test_many_backward_passes_at_once():
    """is_grads_batched runs the backward operator itself under vmap."""
    inputs = [draw(*s, requires_grad=True) for s in ((2, 4, 3), (2, 4, 3), (2, 3))]
    dh = draw(6, 2, 4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it runs as a loop, and torch says so
        mine, right = (
            torch.autograd.grad(linear_scan(*inputs, backend=name), inputs, dh, is_grads_batched=True)
            for name in ("numba", "reference")
        )
    assert_equal_trees(mine, right)


# ---- the compiler ----------------------------------------------------------------------------------------------------


def run(function, inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    h = function(*inputs)
    return h, *torch.autograd.grad(h.abs().square().sum() + h[:, -1].abs().sum(), inputs)


@pytest.mark.compile
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "reverse"), zip(FULL_TYPES, (False, True, True, False)), ids=str)
def test_compile_equals_eager(dtype, reverse, compiler):
    function = lambda a, b, h0: linear_scan(a * 0.5, b + 1, h0, reverse=reverse) * 2  # noqa: E731
    inputs = draw(2, 9, 17, dtype=dtype), draw(2, 9, 17, dtype=dtype), draw(2, 17, dtype=dtype)
    tolerance = 1e-5 if dtype.to_real() == torch.float32 else 1e-12
    compiled, eager = (run(f, inputs) for f in (torch.compile(function, fullgraph=True, backend=compiler), function))
    torch.testing.assert_close(compiled, eager, rtol=tolerance, atol=tolerance)


@pytest.mark.compile
def test_compile_with_broadcast_gates_bfloat16_and_changing_sizes():
    function = lambda a, b: linear_scan(a.sigmoid(), b)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for batch, length, channels in ((2, 9, 17), (3, 5, 8)):
        inputs = draw(channels, dtype=torch.bfloat16), draw(batch, length, channels, dtype=torch.bfloat16)
        found, expected = run(compiled, inputs), run(function, inputs)
        assert found[0].dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.compile
def test_compiled_graphs_hold_one_operator_each_way():
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    seen = []

    def record(module, _):
        seen.append([str(n.target) for n in module.graph.nodes if str(n.target).startswith("recurra.")])
        return make_boxed_func(module.forward)

    compiled = torch.compile(
        scan_of("auto"), fullgraph=True, backend=aot_autograd(fw_compiler=record, bw_compiler=record)
    )
    run(compiled, (draw(2, 4, 3), draw(2, 4, 3), draw(2, 3)))
    assert seen == [["recurra.linear_scan.default"], ["recurra.linear_scan_backward.default"]]


@pytest.mark.compile
def test_compiled_forward_derivatives_raise_or_are_right():
    """The compiler looks past the rule for forward derivatives: it must not silently return zeros."""
    x, dx = (tuple(draw(*s) for s in ((2, 4, 3), (2, 4, 3), (2, 3))) for _ in range(2))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="no derivative"):
        torch.compile(lambda: jvp(scan_of("numba"), x, dx), fullgraph=True, backend="eager")()
    torch.compiler.reset()
    actual = torch.compile(lambda: jvp(scan_of("numba"), x, dx), backend="eager")()  # falls back to eager
    assert_equal_trees(actual, jvp(scan_of("reference"), x, dx))


@pytest.mark.compile
def test_torch_func_differentiates_a_compiled_function():
    """The way round that docs/guides/contract.md gives: torch.compile cannot trace torch.func.grad of an operator."""
    function = lambda a, b: linear_scan(a, b).square().sum()  # noqa: E731
    inputs = draw(2, 4, 3), draw(2, 4, 3)
    actual = torch.func.grad(torch.compile(function, backend="aot_eager"))(*inputs)
    torch.testing.assert_close(actual, torch.func.grad(function)(*inputs))
