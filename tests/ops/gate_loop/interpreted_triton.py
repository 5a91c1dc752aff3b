"""The fused Triton kernels beside the reference. tests/test_triton.py runs this file."""

import itertools

import pytest
import torch
from tests.gradients import differentiate
from tests.quick_interpreter import DEVICE, sampled

from recurra import gate_loop
from recurra.ops._toolkit.triton import Plan
from recurra.ops.gate_loop import _triton as triton_kernels
from recurra.ops.gate_loop.fused import Planes, fused
from recurra.ops.gate_loop.operator import gate_loop_real_part

CUT = Plan(3, 3, 4)  # 7 steps in chunks of 3, 3 and 1, 5 channels in tiles of 4 and 1
WHOLE = Plan(7, 1, 8)
KINDS = ("real", "complex")
COMPLEX_AT_LEAST = sampled([(kind,) for kind in KINDS], lambda kind: kind == "complex")
BFLOAT16_STEP = 2**-7  # the interpreter rounds to bfloat16 towards zero, a card to the nearest

TYPES = {
    "whole": (WHOLE, torch.float64, torch.float64, 1e-13),
    "cut": (CUT, torch.float64, torch.float64, 1e-13),
    "cut-float32": (CUT, torch.float32, torch.float32, 2e-6),
    "cut-bfloat16": (CUT, torch.bfloat16, torch.float32, BFLOAT16_STEP),
}


def draw(batch, length, channels, kind, number=torch.float64, plane=torch.float64):
    """q, k, v, the planes of a and those of the state."""
    q, k, v = torch.randn(3, batch, length, channels, dtype=torch.float64, device=DEVICE).to(number)
    a = torch.randn(2, batch, length, channels, dtype=torch.float64, device=DEVICE)
    a = 0.97 * a / a.norm(dim=0) if kind == "complex" else 0.97 * a.sign()  # long memories
    a, state = a.to(plane), torch.randn(2, batch, channels, dtype=torch.float64, device=DEVICE).to(plane)
    return [q, k, v, *a, *state] if kind == "complex" else [q, k, v, a[0], state[0]]


def call(tensors, backend, **options):
    if len(tensors) == 5:
        result = fused(*tensors[:3], Planes(tensors[3], None), Planes(tensors[4], None), backend=backend, **options)
    else:
        result = fused(*tensors[:3], Planes(*tensors[3:5]), Planes(*tensors[5:]), backend=backend, **options)
    return [x for x in (result.y, *result.states, *result.last) if x is not None]


def run(tensors, backend, chosen=None):
    return differentiate(lambda *x: call(x, backend), tensors, chosen)


def assert_near(actual, expected, tolerance):
    for mine, right in zip(actual, expected, strict=True):
        assert (mine.dtype, mine.shape) == (right.dtype, right.shape)
        of_planes = 2e-6 if tolerance == BFLOAT16_STEP and right.dtype == torch.float32 else tolerance
        assert (mine - right).abs().max() <= of_planes * right.abs().max().clamp_min(1e-300)


@pytest.fixture
def cut(monkeypatch):
    monkeypatch.setattr(triton_kernels, "plan", lambda *_: CUT)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("what", "kind"),
    sampled(
        itertools.product(TYPES, KINDS),
        lambda what, kind: what == "whole" or (what == "cut-bfloat16") == (kind == "real"),
    ),
)
def test_outputs_and_gradients(what, kind, monkeypatch):
    """Cut, all kernels run in every type; whole, two of them and nothing else."""
    laid_out, number, plane, tolerance = TYPES[what]
    monkeypatch.setattr(triton_kernels, "plan", lambda *_: laid_out)
    tensors = draw(2, 7, 5, kind, number, plane)
    assert_near(run(tensors, "triton"), run(tensors, "reference"), tolerance)


@pytest.mark.parametrize("kind", COMPLEX_AT_LEAST)
def test_its_own_plans(kind):
    for shape in ((1, 70, 3), (3, 2, 17), (1, 1, 1)):
        tensors = draw(*shape, kind)
        assert_near(run(tensors, "triton"), run(tensors, "reference"), 1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_every_output_sends_its_gradient_back(kind):
    """y, the states and the last state, each alone; the others have no gradient."""
    tensors = draw(1, 4, 3, kind)
    n = len(run(tensors, "reference")) - len(tensors)
    for chosen in [*itertools.combinations(range(n), 1), range(1, n)]:
        assert_near(run(tensors, "triton", chosen), run(tensors, "reference", chosen), 1e-13)


@pytest.mark.usefixtures("cut", "poisoned_memory")
@pytest.mark.parametrize("kind", COMPLEX_AT_LEAST)
def test_without_gradients_only_the_last_state_is_kept(kind):
    tensors = draw(2, 7, 5, kind)
    y, *rest = call(tensors, "triton")
    right_y, *right = call(tensors, "reference")
    planes = len(rest) // 2
    assert [x.shape for x in rest[:planes]] == [(2, 1, 5)] * planes
    assert_near([y, *rest[planes:]], [right_y, *right[planes:]], 1e-13)
    assert_near(call(tensors, "triton", keep_states=True), [right_y, *right], 1e-13)


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("kind", COMPLEX_AT_LEAST)
def test_memory_layouts(kind):
    """q, k, v from one projection, one transition for all steps, planes of a complex tensor, channels with gaps."""
    tensors = draw(2, 7, 5, kind)
    tensors[:3] = torch.randn(2, 7, 15, dtype=torch.float64, device=DEVICE).split(5, -1)
    tensors[3] = tensors[3][:, :1].expand(2, 7, 5)
    tensors[-1] = tensors[-1].T.contiguous().T
    if kind == "complex":
        tensors[4] = torch.complex(tensors[4], tensors[4]).imag
    assert_near(run(tensors, "triton"), run(tensors, "reference"), 1e-13)


@pytest.mark.parametrize("kind", COMPLEX_AT_LEAST)
def test_second_gradients_and_the_operator(kind):
    tensors = [x.requires_grad_() for x in draw(1, 3, 2, kind)]
    seconds = []
    for backend in ("triton", "reference"):
        y = call(tensors, backend)[0]
        first = torch.autograd.grad(y.square().sum(), tensors, create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in first), tensors))
    assert_near(*seconds, 1e-12)
    q, k, v, *others = (x.detach() for x in tensors)
    a, state = ((others[0], None), (others[1], None)) if kind == "real" else (others[:2], others[2:])
    torch.library.opcheck(torch.ops.recurra.gate_loop_fused.default, (q, k, v, *a, *state, True, "triton"))


def test_through_the_front_doors():
    q, k, v = torch.randn(3, 2, 5, 3, 1, dtype=torch.float64, device=DEVICE)
    a = torch.polar(torch.rand_like(q), torch.randn_like(q))
    state = torch.randn(2, 3, 1, 1, dtype=torch.complex128, device=DEVICE)
    for call_one in (
        lambda name: gate_loop(q, k, v, a, state=state, backend=name),
        lambda name: gate_loop(q, k, v, a.real, backend=name),
        lambda name: gate_loop_real_part(q, k, v, Planes(a.real, a.imag), state=state, backend=name),
    ):
        torch.testing.assert_close(call_one("triton"), call_one("reference"), rtol=1e-13, atol=1e-13)
