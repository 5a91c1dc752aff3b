"""The Triton scan beside the reference. tests/test_triton.py runs this file."""

import itertools

import pytest
import torch
from tests.quick_interpreter import DEVICE, INTERPRETED, sampled
from torch.func import jvp, vmap

from recurra import linear_scan
from recurra.ops._toolkit.triton import Plan, plan
from recurra.ops.scan import _triton as triton_kernels

WIDE = (torch.float64, torch.complex128)
EXACT = {"rtol": 1e-13, "atol": 1e-13}
SHAPES = [(2, 9, 5), (1, 65, 17), (1, 1, 1), (3, 2, 33)]
COMPLEX_AT_LEAST = sampled([(dtype,) for dtype in WIDE], lambda dtype: dtype.is_complex)
CUT = Plan(3, 3, 4)  # 7 steps in chunks of 3, 3 and 1, 5 channels in tiles of 4 and 1


def draw(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, device=DEVICE).mul(0.7)


def solve(inputs, dh, backend, reverse=False):
    """H and its gradients for a, b and h0."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    h = linear_scan(*leaves, reverse=reverse, backend=backend)
    return [h.detach(), *torch.autograd.grad(h, leaves, dh)]


def assert_as_the_reference(inputs, dh, reverse=False, **tolerance):
    mine, right = (solve(inputs, dh, backend, reverse) for backend in ("triton", "reference"))
    torch.testing.assert_close(mine, right, **(tolerance or EXACT))
    return mine, right


@pytest.fixture
def cut(monkeypatch):
    monkeypatch.setattr(triton_kernels, "plan", lambda *_: CUT)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("shape", "dtype", "reverse"),
    sampled(itertools.product(SHAPES, WIDE, (False, True)), lambda _, dtype, reverse: dtype.is_complex == reverse),
    ids=str,
)
def test_states_and_gradients(shape, dtype, reverse):
    inputs = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype), draw(shape[0], shape[2], dtype=dtype)
    mine, right = assert_as_the_reference(inputs, draw(*shape, dtype=dtype), reverse)
    if INTERPRETED and dtype == torch.float64 and shape[1] < 64:  # time in one piece, no fused multiply-add
        assert torch.equal(mine[0], right[0])


def test_half_precision_is_computed_in_float32():
    a, b = draw(1, 9, 5).bfloat16(), draw(1, 9, 5).bfloat16()
    h = linear_scan(a, b, backend="triton")
    assert h.dtype == torch.bfloat16
    torch.testing.assert_close(h, linear_scan(a, b, backend="reference"))


@pytest.mark.usefixtures("cut", "poisoned_memory")
@pytest.mark.parametrize(
    ("dtype", "reverse"),
    sampled(itertools.product(WIDE, (False, True)), lambda dtype, reverse: dtype.is_complex == reverse),
    ids=str,
)
def test_time_cut_into_chunks(dtype, reverse):
    """Carries pass from chunk to chunk, with a shorter last chunk and a narrower last tile."""
    a = draw(2, 7, 5, dtype=dtype)
    a = 0.98 * a / a.abs()  # long memories: what enters the first chunk leaves the last
    b, dh = draw(2, 7, 5, dtype=dtype), draw(2, 7, 5, dtype=dtype)
    assert_as_the_reference((a, b, draw(2, 5, dtype=dtype)), dh, reverse)


@pytest.mark.usefixtures("cut")
def test_closed_gates_between_chunks():
    for step in (2, 3):
        a = torch.ones(2, 7, 5, dtype=torch.float64, device=DEVICE)
        a[:, step] = 0
        assert_as_the_reference((a, draw(2, 7, 5), draw(2, 5)), draw(2, 7, 5))


@pytest.mark.parametrize("dtype", COMPLEX_AT_LEAST, ids=str)
def test_memory_layouts(dtype, request):
    shape = (2, 7, 5)
    b, h0, dh = draw(*shape, dtype=dtype), draw(2, 5, dtype=dtype), draw(*shape, dtype=dtype)
    gates = {
        "for all steps": draw(5, dtype=dtype),
        "for all channels": draw(7, 1, dtype=dtype),
        "turned": draw(5, 7, 2, dtype=dtype).permute(2, 1, 0),
        "every second": draw(2, 7, 10, dtype=dtype)[..., ::2],
        "conjugate": draw(*shape, dtype=dtype).conj(),
    }
    for a in gates.values():
        assert_as_the_reference((a, b, h0), dh)
    a = gates["turned"]
    request.getfixturevalue("cut")
    others = draw(5, 2, 7, dtype=dtype).permute(1, 2, 0), draw(5, 2, dtype=dtype).T.conj()
    assert_as_the_reference((a, *others), draw(1, 1, 5, dtype=dtype).expand(shape))
    assert_as_the_reference((a, *others), draw(2, 5, 7, dtype=dtype).mT.conj(), reverse=True)


def test_further_channel_dimensions_and_no_first_state():
    a, b = draw(3, 1, 2), draw(2, 7, 3, 4, 2)
    for reverse in (False, True):
        mine, right = (linear_scan(a, b, reverse=reverse, backend=name) for name in ("triton", "reference"))
        torch.testing.assert_close(mine, right, **EXACT)


def test_empty_tensors():
    for shape in ((0, 4, 3), (2, 0, 3), (2, 4, 0)):
        b = draw(*shape).requires_grad_()
        linear_scan(torch.ones_like(b), b, backend="triton").sum().backward()
        assert b.grad.shape == shape
        h0 = draw(shape[0], shape[2])
        assert torch.ops.recurra.linear_scan(b.detach(), b.detach(), h0, False, "triton").shape == shape
        if shape[1]:
            gradients = torch.ops.recurra.linear_scan_backward(*[b.detach()] * 3, h0, False, "triton")
            assert [x.shape for x in gradients] == [shape, shape, h0.shape]


@pytest.mark.parametrize("dtype", COMPLEX_AT_LEAST, ids=str)
def test_the_other_derivatives(dtype):
    x = draw(2, 4, 3, dtype=dtype), draw(2, 4, 3, dtype=dtype), draw(2, 3, dtype=dtype)

    def second(f):
        leaves = [t.detach().requires_grad_() for t in x]
        first = torch.autograd.grad(f(*leaves).abs().pow(3).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.abs().square().sum() for g in first), leaves)

    for transform in (
        second,
        lambda f: jvp(f, x, tuple(t.flip(-1) for t in x)),
        lambda f: vmap(f, (None, 0, 0))(x[0], torch.stack([x[1], x[0]]), torch.stack([x[2], 2 * x[2]])),
    ):
        mine, right = (
            transform(lambda a, b, h0, n=name: linear_scan(a, b, h0, backend=n)) for name in ("triton", "reference")
        )
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-11)


def test_opcheck():
    a, b, h0 = draw(2, 5, 3, dtype=torch.complex64), draw(2, 5, 3, dtype=torch.complex64), draw(2, 3) + 0j
    torch.library.opcheck(torch.ops.recurra.linear_scan.default, (a, b, h0.to(a.dtype), True, "triton"))


def test_plans_cover_all_steps():
    for batch, length, channels in ((1, 1, 1), (1, 65_537, 3), (2, 1000, 64), (64, 4096, 4096), (1, 33, 1), (1, 96, 7)):
        laid_out = plan(batch, length, channels, DEVICE)
        assert (laid_out.chunks - 1) * laid_out.span < length <= laid_out.chunks * laid_out.span
        assert laid_out.chunks == 1 or laid_out.span >= 32
    assert plan(64, 4096, 4096, DEVICE).chunks == 1, "enough sequences and channels"
    assert plan(1, 65_537, 3, DEVICE).chunks > 100, "few channels and long time"
