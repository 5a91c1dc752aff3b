"""The Triton kernels of mode "chunk" beside "recurrent". tests/test_triton.py runs this file."""

import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from tests.gradients import differentiate, require_near
from tests.quick_interpreter import DEVICE, INTERPRETED, NUMBER, TOLERANCE, sampled
from torch.func import jvp, vmap

from recurra import gate_loop
from recurra.ops._toolkit.triton import default_tiles
from recurra.ops.gate_loop import _triton_chunk as triton_chunk
from recurra.ops.gate_loop import operator
from recurra.ops.gate_loop._heads import chunk_by_kernels

NAMES = ("y", "last state", "dq", "dk", "dv", "da", "dstate")


class Case(NamedTuple):
    """Sizes; whether each key channel has a transition; "a" for complex transitions, "qa" for all complex."""

    batch: int
    length: int
    heads: int
    d_qk: int
    d_v: int
    vector: bool = False
    complex_: str = ""

    def draw(self, number=NUMBER):
        wide, complex_ = torch.float64, torch.complex128
        steps = self.batch, self.length, self.heads
        kind = complex_ if "q" in self.complex_ else wide
        q, k = torch.randn(2, *steps, self.d_qk, dtype=kind)
        v = torch.randn(*steps, self.d_v, dtype=kind)
        kind = complex_ if "a" in self.complex_ else wide
        a = torch.randn(*steps, self.d_qk if self.vector else 1, dtype=kind)
        a = a / a.abs() * torch.sigmoid(2 + 2 * torch.randn(a.shape, dtype=wide))
        state = torch.randn(self.batch, self.heads, self.d_qk, self.d_v, dtype=kind)
        return [to_number(x, number).to(DEVICE) for x in (q, k, v, a, state)]


# with chunks of 8 steps: one chunk, several, a last one of a single step; and several tiles on each side
CASES = {
    "one step": Case(1, 1, 1, 5, 3),
    "two steps": Case(2, 2, 1, 5, 3, vector=True, complex_="a"),
    "scalar": Case(1, 17, 1, 5, 17),
    "scalar, tiles": Case(1, 9, 1, 40, 35),
    "scalar, batch and heads": Case(2, 2, 3, 5, 3),
    "scalar, complex": Case(1, 11, 1, 17, 5, complex_="a"),
    "scalar, all complex": Case(1, 11, 1, 5, 3, complex_="qa"),
    "vector": Case(1, 17, 1, 5, 17, vector=True),
    "vector, tiles": Case(1, 9, 1, 40, 35, vector=True),
    "vector, complex": Case(1, 11, 1, 5, 3, vector=True, complex_="a"),
    "vector, all complex": Case(1, 10, 1, 5, 3, vector=True, complex_="qa"),
}

QUICK = "two steps", "scalar", "scalar, batch and heads", "scalar, complex", "vector, tiles", "vector, all complex"


def to_number(x, number):
    return x.to(number.to_complex() if x.is_complex() else number)


def by_steps(q, k, v, a, state):
    return gate_loop(q, k, v, a, state=state, mode="recurrent")


def assert_near(actual, expected, tolerance=TOLERANCE):
    require_near(actual, expected, tolerance, NAMES, mixed=True)


@pytest.fixture(autouse=True)
def _short_chunks(request, monkeypatch):
    """Blocks of 4 steps, two to a chunk; on a card, which cannot multiply so few, blocks of 16, each a chunk."""
    if "own_blocks" not in request.fixturenames:
        block, span = (4, 8) if INTERPRETED else (16, 16)
    elif INTERPRETED:
        block = default_tiles("chunk", False).block
        span = 2 * block
    else:
        return

    def short(kernel, number, is_complex, device):
        return replace(default_tiles("chunk", is_complex), block=block, span=span)

    monkeypatch.setattr(triton_chunk, "tiles_for", short)


@pytest.fixture
def own_blocks():
    """Keep the size of blocks."""


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("case", sampled([(name,) for name in CASES], QUICK.__contains__))
def test_outputs_and_gradients(case):
    tensors = CASES[case].draw()
    assert_near(differentiate(chunk_by_kernels, tensors), differentiate(by_steps, tensors))


@pytest.mark.usefixtures("own_blocks", "poisoned_memory")
@pytest.mark.parametrize(
    "case",
    sampled([(Case(1, 33, 1, 5, 3),), (Case(1, 17, 1, 5, 3, True, "a"),)], lambda case: case.vector),
    ids=["scalar", "vector"],
)
def test_blocks_of_their_own_size(case):
    tensors = case.draw()
    assert_near(differentiate(chunk_by_kernels, tensors), differentiate(by_steps, tensors))


@pytest.mark.parametrize(
    ("complex_", "vector"),
    sampled(itertools.product(("", "a"), (False, True)), lambda complex_, vector: bool(complex_) == vector),
)
def test_gates_of_nothing_little_and_all(vector, complex_):
    """Transitions of 0, 1e-6, 1 and 1e6 next to each other; a transition of 0 has a gradient too."""
    q, k, v, a, state = Case(1, 11, 1, 5, 3, vector, complex_).draw()
    sizes = torch.tensor([0, 1e-6, 1, 1, 1, 1e6], dtype=NUMBER, device=DEVICE)
    a = a / a.abs() * sizes[torch.randint(6, a.shape, device=DEVICE)].clamp_max(1 if DEVICE.type == "cuda" else 1e6)
    a[:, -1] = 0
    expected = differentiate(by_steps, [q, k, v, a, state])
    assert expected[5][:, -1].abs().min() > 0
    actual = differentiate(chunk_by_kernels, [q, k, v, a, state])
    for mine, right in zip((x.detach() for x in actual), (x.detach() for x in expected)):
        torch.testing.assert_close(mine, right, rtol=100 * TOLERANCE, atol=TOLERANCE * right.abs().median().item())


@pytest.mark.usefixtures("own_blocks")
@pytest.mark.parametrize("gate", [1e-6, 1.0])
def test_single_precision_over_a_chunk_of_equal_gates(gate):
    """These transitions multiply to 1e-102, which float32 cannot hold; neighbours still see each other."""
    q, k, v, _, state = Case(1, 17, 1, 5, 3).draw(torch.float32)
    a = torch.full((1, 17, 1, 1), gate, device=DEVICE)
    actual = differentiate(chunk_by_kernels, [q, k, v, a, state])
    assert {x.dtype for x in actual} == {torch.float32}
    assert_near(
        actual, differentiate(by_steps, [x.double() for x in (q, k, v, a, state)]), 2e-6 if INTERPRETED else 2e-5
    )


@pytest.mark.parametrize("chosen", [0, 1])
def test_either_output_alone_sends_its_gradient_back(chosen):
    tensors = Case(1, 3, 1, 2, 3).draw()
    assert_near(differentiate(chunk_by_kernels, tensors, [chosen]), differentiate(by_steps, tensors, [chosen]))


@pytest.mark.parametrize(
    "dtype", sampled([(torch.float16,), (torch.bfloat16,)], lambda dtype: dtype == torch.bfloat16), ids=str
)
def test_half_types_through_the_front_door(dtype):
    """Read in their type and computed in float32; y and gradients are rounded once, states never."""
    q, k, v, a, state = Case(1, 5, 1, 5, 3).draw(torch.float32)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    front = lambda *x: gate_loop(*x[:4], state=x[4], mode="chunk", backend="triton")  # noqa: E731
    actual = differentiate(front, [q, k, v, a, state])
    assert [x.dtype for x in actual] == [dtype, torch.float32, *[dtype] * 3, torch.float32, torch.float32]
    assert chunk_by_kernels(q, k, v, a, state)[0].dtype == dtype
    wide = differentiate(by_steps, [x.float() for x in (q, k, v, a, state)])
    rounding = torch.finfo(dtype).eps
    assert_near(actual, wide, 2 * rounding)
    torch.testing.assert_close(actual[1], wide[1], **({} if INTERPRETED else {"rtol": rounding, "atol": rounding}))
    y, last = front(q, k, v, torch.complex(a, a), state)
    right, right_last = by_steps(q.float(), k.float(), v.float(), torch.complex(a, a), state)
    torch.testing.assert_close((y, last), (right, right_last), rtol=rounding, atol=rounding)


def test_the_front_door(monkeypatch):
    """By name it runs the kernels or says why not; "auto" uses them only on a card, if they apply."""
    launched = []
    original = operator.chunk_by_kernels
    monkeypatch.setattr(operator, "chunk_by_kernels", lambda *x: launched.append(1) or original(*x))
    q, k, v, a, state = Case(1, 3, 1, 5, 3).draw(torch.float32)
    mixed = [
        (q, k, v, a, state),
        (q, k + 0j, v, a, state),
        (q, k, v, a, state + 1j),
        (q.double().half(), k, v, a, state),
    ]
    for q_, k_, v_, a_, state_ in mixed:
        y, last = gate_loop(q_, k_, v_, a_, state=state_, mode="chunk", backend="triton")
        expected = by_steps(q_, k_, v_, a_, state_)
        torch.testing.assert_close((y, last), expected, rtol=1e-4, atol=1e-5)
    assert len(launched) == 4
    gate_loop(q, k, v, a, mode="chunk")
    assert len(launched) == (4 if INTERPRETED else 5)
    with pytest.raises(
        ValueError, match=r"backend is 'triton'; .* compute chunks in float32 and complex64, not in float64"
    ):
        gate_loop(q, k, v, a.double(), mode="chunk", backend="triton")
    for wide, gate, largest in (
        (torch.ones(1, 2, 1, 129), a[:, :2], 128),
        (torch.ones(1, 2, 1, 65), a[:, :2] + 0j, 64),
    ):
        wide = wide.to(DEVICE)
        with pytest.raises(ValueError, match=rf"backend is 'triton'; .* heads of up to {largest} channels"):
            gate_loop(wide, wide, v[:, :2], gate, mode="chunk", backend="triton")
        gate_loop(wide, wide, v[:, :2], gate, mode="chunk")
    gate_loop(q.double(), k, v, a, mode="chunk")
    assert len(launched) == (4 if INTERPRETED else 5)
    monkeypatch.setattr(operator, "choose_backend", lambda *_: "triton")  # as on a card
    monkeypatch.setattr(operator, "chunk_by_kernels", lambda *x: pytest.fail("the kernels do not take this"))
    gate_loop(wide, wide, v[:, :2], gate, mode="chunk")
    gate_loop(q.double(), k, v, a, mode="chunk")


def test_memory_layouts():
    """q, k, v from one projection, one transition for all steps, channels with gaps, conjugates."""
    case = Case(2, 2, 2, 5, 5, True, "qa")
    q, k, v, a, state = case.draw()
    q, k, v = torch.cat([q, k, v], -1).split(5, -1)
    a = a[:, :1].expand(a.shape).conj()
    k = k.mT.contiguous().mT
    v, state = v.transpose(0, 2).contiguous().transpose(0, 2), state.mT.contiguous().mT
    expected = differentiate(by_steps, [x.resolve_conj().contiguous() for x in (q, k, v, a, state)])
    assert_near(differentiate(chunk_by_kernels, [q, k, v, a, state]), expected)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("shape", [(0, 4, 3, 2, 3), (2, 0, 3, 2, 3), (2, 4, 0, 2, 3)], ids=str)
def test_empty_tensors(shape):
    batch, length, heads, d_qk, d_v = shape
    q, v = (torch.ones(batch, length, heads, d, device=DEVICE) for d in (d_qk, d_v))
    state = torch.randn(batch, heads, d_qk, d_v, device=DEVICE)
    y, last, *gradients = differentiate(chunk_by_kernels, [q, q, v, q, state])
    assert y.shape == v.shape
    assert torch.equal(last, state)
    assert [x.shape for x in gradients] == [x.shape for x in (q, q, v, q, state)]


def test_derivatives_are_right_or_raise():
    tensors = [x.requires_grad_() for x in Case(1, 2, 1, 2, 3, False, "a").draw()]
    seconds = []
    for function in (chunk_by_kernels, by_steps):
        y, last = function(*tensors)
        first = torch.autograd.grad(y.abs().square().sum() + last.real.sum(), tensors, create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.abs().square().sum() for g in first), tensors))
    torch.testing.assert_close(*seconds, rtol=100 * TOLERANCE, atol=100 * TOLERANCE)
    x = Case(1, 2, 1, 2, 2).draw()[0].detach()
    function = lambda x: chunk_by_kernels(x, x, x, x, x.new_zeros(1, 1, 2, 2))[0]  # noqa: E731
    expected = function(x)
    torch.testing.assert_close(vmap(function)(x[None])[0], expected, rtol=TOLERANCE, atol=TOLERANCE)
    tangent = jvp(function, (x,), (x,))[1]  # y has three factors x, and those of later steps two more each
    torch.testing.assert_close(tangent[0, 0], 3 * expected[0, 0], rtol=100 * TOLERANCE, atol=TOLERANCE)
    recorded = torch.ops.recurra.gate_loop_chunk(*tensors)[0]  # as in a program of torch.export
    assert recorded.requires_grad


def test_the_operators():
    tensors = Case(1, 1, 1, 2, 3, False, "a").draw()
    torch.library.opcheck(torch.ops.recurra.gate_loop_chunk.default, tensors)
    y, last = torch.ops.recurra.gate_loop_chunk(*tensors)
    for gradients in ((y, last), (None, last)):
        torch.library.opcheck(
            torch.ops.recurra.gate_loop_chunk_backward.default,
            (*gradients, *tensors),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize("compiler", sampled([("aot_eager",)], lambda _: False))
def test_traced_in_full(compiler):
    """By the compiler's tracers, forward and backward."""
    tensors = Case(1, 2, 1, 2, 3).draw(torch.float32)
    function = lambda q, k, v, a, state: gate_loop(  # noqa: E731
        2 * q, k, v, a.sigmoid(), state=state, mode="chunk", backend="triton"
    )
    compiled = torch.compile(function, fullgraph=True, backend=compiler)
    assert_near(differentiate(compiled, tensors), differentiate(function, tensors), 1e-6)
