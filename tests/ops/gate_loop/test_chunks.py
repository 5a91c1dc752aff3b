"""Numba's kernels for chunks of heads with one gate: sizes beside theirs, groups of heads, and gates of almost 0."""

import pytest
import torch
from tests.ops.gate_loop.conftest import Case, Inputs
from tests.ops.gate_loop.test_modes import assert_near, differentiate

from recurra import gate_loop
from recurra.ops._toolkit.vectors import compiles_for
from recurra.ops.gate_loop import _heads as heads
from recurra.ops.gate_loop.reference import recurrent

LARGE = Case(2, 100, 90, 1)  # in chunks without being told
CASES = {"odd": Case(2, 33, 39, 1), "long chunks": Case(1, 70, 128, 1), "without padding": Case(3, 32, 64, 1)}
LENGTHS = [32, 70, 129]  # chunks have 32 steps, or 64 for large states
WORDS = [
    "float32",
    pytest.param("bfloat16", marks=pytest.mark.skipif(not compiles_for("avx512bf16"), reason="no AVX-512 BF16")),
]
ROUNDINGS = 5
"""To bfloat16, of the factors of any term. da has the most: a state of rounded keys and values meets a carry of rounded
queries and gradients. Terms of other results pass four."""


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def by_kernels(inputs, rounded=False):
    return heads.chunk_by_heads(*inputs[:4], inputs.state, rounded)


def step_by_step(inputs):
    q, k = (heads.of_all_heads(x, inputs.v) for x in inputs[:2])
    return recurrent(q, k, inputs.v, inputs.a, inputs.state, "reference")


def with_gates_of_almost_zero(inputs):
    a = inputs.a.clone()
    a[:, ::9], a[:, 3:6], a[:, 20], a[:, 29:31] = 0, 0, 1e-20, 1e-8
    return inputs._replace(a=a)


@pytest.fixture
def in_chunks(monkeypatch):
    """Take the kernels for chunks for small states too, and fail if they report results that are not finite."""

    def choose(number):
        monkeypatch.setattr(heads, "_factors", lambda *_: number)
        run = heads._run_chunks
        monkeypatch.setattr(heads, "_run_chunks", lambda *arguments: run(*arguments) or pytest.fail("fell back"))

    return choose


def assert_within_roundings(found, inputs, number):
    """Compare with bounds term by term: the same sums of magnitudes, times the roundings of each term."""
    if number == "float32":
        assert_near(found, differentiate(step_by_step, inputs), 2e-6, "the kernels")
        return
    names = "y", "last", "dq", "dk", "dv", "da", "dstate"
    leaves = Inputs(*(x.detach().requires_grad_() for x in inputs))
    sizes = Inputs(*(x.detach().abs().requires_grad_() for x in inputs))
    outputs, bounds = step_by_step(leaves), step_by_step(sizes)
    generator = torch.Generator().manual_seed(1)  # as in `differentiate`
    weights = [torch.randn(x.shape, dtype=torch.complex128, generator=generator).real for x in outputs]
    exact = [*outputs, *torch.autograd.grad(outputs, leaves, weights)]
    most = [*bounds, *torch.autograd.grad(bounds, sizes, [w.abs() for w in weights])]
    for name, mine, right, bound in zip(names, found, exact, most):
        error, allowed = (mine.double() - right).abs(), 1.01 * ROUNDINGS * 2.0**-9 * bound + 1e-5
        assert (error <= allowed).all(), f"{name}: {(error / allowed).max():.2f} of what is allowed"


@pytest.mark.parametrize("number", WORDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_size(case, length, number, in_chunks):
    in_chunks(number)
    inputs = case.draw(length)
    assert_within_roundings(differentiate(by_kernels, inputs.to(torch.float32)), inputs, number)


@pytest.mark.parametrize("number", WORDS)
def test_gates_of_almost_zero(number, in_chunks):
    in_chunks(number)
    inputs = with_gates_of_almost_zero(CASES["odd"].draw(70).to(torch.float32)).to(torch.float64)
    assert_within_roundings(differentiate(by_kernels, inputs.to(torch.float32)), inputs, number)


@pytest.mark.parametrize("number", WORDS)
@pytest.mark.parametrize("groups", [1, 2])
def test_heads_share_queries_and_keys(groups, number, in_chunks):
    in_chunks(number)
    inputs = Case(6, 33, 39, 1).draw(70)
    inputs = inputs._replace(q=inputs.q[:, :, :groups], k=inputs.k[:, :, :groups])
    assert_within_roundings(differentiate(by_kernels, inputs.to(torch.float32)), inputs, number)


def test_groups_are_split_if_threads_are_more(set_threads):
    inputs = Case(4, 100, 90, 1).draw(70, batch=1).to(torch.float32)
    inputs = inputs._replace(q=inputs.q[:, :, :1], k=inputs.k[:, :, :1])
    expected = differentiate(step_by_step, inputs.to(torch.float64))
    set_threads(2)
    assert_near(differentiate(by_kernels, inputs), expected, 2e-6, "two threads")


def test_threads_share_the_heads(set_threads):
    inputs, found = LARGE.draw(70).to(torch.float32), []
    for n in (1, 2):
        set_threads(n)
        found.append(differentiate(by_kernels, inputs))
    assert all(map(torch.equal, *found))


def test_gates_without_a_gradient(in_chunks):
    in_chunks("float32")
    inputs = CASES["odd"].draw(70)
    rest = lambda function, a: lambda x: function(Inputs(x.q, x.k, x.v, a, x.state))  # noqa: E731
    leaves = [x.to(torch.float32).requires_grad_(i != 3) for i, x in enumerate(inputs)]
    y, _ = rest(by_kernels, leaves[3])(Inputs(*leaves))
    found = torch.autograd.grad(y.square().sum(), [leaves[i] for i in (0, 1, 2, 4)])
    wide = [x.double().requires_grad_() for x in inputs]
    y, _ = step_by_step(Inputs(*wide))
    expected = torch.autograd.grad(y.square().sum(), [wide[i] for i in (0, 1, 2, 4)])
    assert_near(found, expected, 5e-6, "the kernels")


@pytest.mark.parametrize("name", ["q", "k", "v", "a"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("rounded", [False, True])
def test_what_is_not_finite_reaches_no_step_before(name, value, rounded):
    inputs = Case(1, 64, 128, 1).draw(70).to(torch.float32)
    changed = inputs._replace(**{name: getattr(inputs, name).clone()})
    getattr(changed, name)[0, 50] = value
    found, expected = differentiate(lambda x: by_kernels(x, rounded), changed), differentiate(step_by_step, changed)
    for mine, right in zip(found, expected):  # what overflows depends on the order of sums
        assert value == 3e38 or torch.equal(mine.isfinite(), right.isfinite())
    torch.testing.assert_close(found[0][0, :50], expected[0][0, :50], rtol=1e-5, atol=1e-5)


def test_a_gradient_that_is_not_finite_reaches_no_step_after():
    inputs = Case(1, 64, 128, 1).draw(70).to(torch.float32)
    results = []
    for function in (by_kernels, lambda x: by_kernels(x, rounded=True), step_by_step):
        leaves = Inputs(*(x.clone().requires_grad_() for x in inputs))
        y, _ = function(leaves)
        dy = torch.ones_like(y)
        dy[0, 40] = torch.inf
        results.append(torch.autograd.grad(y, leaves, dy))
    for mine, rounded, right in zip(*results):
        assert torch.equal(mine.isfinite(), right.isfinite())
        assert torch.equal(rounded.isfinite(), right.isfinite())


@pytest.mark.parametrize("mode", ["auto", "recurrent", "scan", "chunk", "attention"])
def test_every_mode_takes_groups(mode):
    inputs = Case(4, 3, 2, 1).draw(7)
    q, k, v, a = inputs.q[:, :, ::2], inputs.k[:, :, ::2], inputs.v, inputs.a
    y, last = gate_loop(q, k, v, a, state=inputs.state, mode=mode)
    expected = recurrent(q.repeat_interleave(2, 2), k.repeat_interleave(2, 2), v, a, inputs.state, "reference")
    torch.testing.assert_close((y, last), expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"v is .*; expected \(2, 7, 3, 2\)"):
        gate_loop(inputs.q[:, :, :3], inputs.k[:, :, :3], v, a, mode=mode)


def test_only_bfloat16_rounds():
    """By inputs or by autocast; results then differ from float32's, if the processor has such products at all."""
    inputs = LARGE.draw(70).to(torch.bfloat16).to(torch.float32)
    exact, _ = gate_loop(*inputs[:4], mode="chunk")
    with torch.autocast("cpu", torch.bfloat16):
        by_autocast, _ = gate_loop(*inputs[:4], mode="chunk")
    by_inputs, _ = gate_loop(*(x.bfloat16() for x in inputs[:3]), inputs.a, mode="chunk")
    assert torch.equal(by_inputs, by_autocast.bfloat16())
    assert torch.equal(by_autocast, exact) is not compiles_for("avx512bf16")
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert torch.equal(gate_loop(*inputs[:4], mode="chunk")[0], exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_plain_torch_under_transforms_ignores_autocast(dtype):
    q, k, v = torch.randn(1, 40, 2, 64), torch.randn(1, 40, 2, 64), 3e4 * torch.randn(1, 40, 2, 64)
    a = torch.ones(1, 40, 2, 1)

    def read(q):
        return gate_loop(q, k, v, a, mode="chunk")[0]

    right = read(q)
    with torch.autocast("cpu", dtype=dtype):
        for y in (torch.func.jvp(read, (q,), (q,))[0], torch.vmap(read)(q[None])[0]):
            torch.testing.assert_close(y, right, rtol=1e-4, atol=1e-4 * right.abs().max().item())


def test_a_gradient_of_gates_that_overflows_is_walked_step_by_step():
    a = torch.full((1, 40, 1, 1), 0.5)
    a[:, 4], a[:, 20] = 0, 0
    q, k, v, dy = (torch.randn(1, 40, 1, 128) for _ in range(4))
    k[:, 2] *= 1e10
    q[:, 30] *= 1e10
    dy[:, 30] *= 1e19
    a.requires_grad_()
    y, _ = gate_loop(q, k, v, a, mode="chunk")
    (da,) = torch.autograd.grad(y, a, dy)
    assert da.isfinite().all()
