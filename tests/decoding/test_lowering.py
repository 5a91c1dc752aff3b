"""Every rule against torch: small steps of a few operations, recorded with one set of inputs and run with another."""

import pytest
import torch
from torch.nn import functional as F

from recurra.decoding._instructions import LINEAR, LOOK_UP
from recurra.decoding._program import StepProgram, lower_step
from recurra.decoding.linear import DecodingExperts
from recurra.decoding.memory import StepNotCompiled
from recurra.layers.experts import Experts
from recurra.ops.delta_rule.operator import delta_rule
from recurra.ops.gate_loop import fused  # noqa: F401  (the operator of the rule)
from recurra.ops.scan import operator as operators  # noqa: F401
from recurra.ops.selective_scan.operator import selective_scan

WEIGHT = torch.randn(7, 6)
VECTOR = torch.rand(6) + 0.5
TURN = torch.polar(torch.rand(6), torch.randn(6))
TABLE = torch.randn(9, 6)
EXPERTS, EXPERTS_INT4 = (DecodingExperts(Experts(6, 6, 37), dtype) for dtype in ("float32", "int4"))
EIGENVALUES = -torch.rand(37, 5)


def fused_steps(x, z):
    q, k, v, re, im = x.unbind(-1)
    planes = torch.view_as_real(z[..., 0]).unbind(-1)
    y, h_re, h_im = torch.ops.recurra.gate_loop_fused(q, k, v, re, im, *planes, False, "numba")
    real, last, _ = torch.ops.recurra.gate_loop_fused(q, k, v, re, None, planes[0], None, False, "numba")
    states = torch.ops.recurra.gate_loop_fused(q, k, v, re, im, *planes, True, "numba")
    return y, torch.complex(h_re, h_im), real, last, *states


def delta_step(x, h):
    q, k, v, ab = x[..., :5], x[..., 5:10], x[..., 10:17], x[..., 17:].sigmoid()
    return delta_rule(q, k, v, ab[..., 0], ab[..., 1], h, mode="fused")


def selective_steps(x, step, h):
    b, c = x[..., :5], x[..., 5:10]
    return selective_scan(x, step.exp(), EIGENVALUES, b, c, h)


def choices(x, y):
    changed = x + 0
    is_positive = changed > 0
    changed.neg_()
    infinite = torch.where(x > 0, y, y / 0.0)
    return (
        torch.where(is_positive, changed, y),
        torch.where(y[:1] > 0, 1.5, x),
        torch.where(x.relu() > 0, x, y[0, 0]),
        infinite,
    )


X, Z, S, H = (3, 6), (3, 6, None), (2, 1, 6), (2, 6)  # None: complex
scan = torch.ops.recurra.linear_scan

STEPS = {
    "unary": (lambda x: tuple(getattr(torch, n)(x) for n in ("exp", "sin", "cos", "sigmoid", "tanh", "abs")), [X]),
    "roots": (lambda x: ((x * x).sqrt(), (x * x).rsqrt(), 1 / x, x.reciprocal(), x**2), [X]),
    "gelu": (lambda x: (F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x)), [X]),
    "softplus": (lambda x: (F.softplus(x), F.softplus(30 * x)), [X]),
    "log, exp": (lambda x: (F.logsigmoid(x), F.logsigmoid(30 * x), x.expm1(), (9 * x).expm1()), [X]),
    "bounds": (lambda x: (x.relu(), x.clamp(-0.1, 0.2), x.clamp(max=0), x.clamp(min=0), x.clamp_min(0.1)), [(4, 6)]),
    "two": (lambda x, y: (x + y, x - y, x * y, x / y, torch.maximum(x, y), torch.minimum(x, y)), [(3, 1, 6), (2, 6)]),
    "numbers": (lambda x: (x + 2, x - 1.5, 3 - x, x * 0.3, x / 7, 2 / x), [X]),
    "constants": (lambda x: (x * VECTOR.exp() + torch.ones_like(x), x.new_full((2,), 3.0) * x[0, 0]), [X]),
    "views": (lambda x: (x.t().reshape(2, 9) + 1, x[1:, ::2].clone(), x.unflatten(1, (2, 3))[0] * 2), [X]),
    "copies": (lambda x: (x.t().contiguous(), x.expand(2, 3, 6).clone(), x.t().reshape(-1) + 1), [X]),
    "joined": (lambda x, y: (torch.cat([x, y, x[:0]], 0), torch.stack([x, x, x + 1], 1)), [(3, 6), (2, 6)]),
    "padded": (lambda x: (F.pad(x, (1, 2), value=1.0), F.pad(x, (0, 1, 2, 0))), [X]),
    "sums": (lambda x: (x.sum(-1), x.sum(0, keepdim=True), x.sum((0, 2)), x.sum(), x.mean(1), x.amax(-1)), [(3, 4, 6)]),
    "running sums": (lambda x: (x[:1].cumsum(0), x[:, :1].cumsum(1)), [X]),
    "softmax": (lambda x: (x.softmax(-1), x.softmax(0)), [X]),
    "choices": (choices, [(3, 6), (3, 6)]),
    "glu": (lambda x: (F.glu(x, -1), F.glu(x, 1)), [(3, 4, 6)]),
    "norms": (lambda x: (F.layer_norm(x.t(), (3,)), F.layer_norm(x, (6,), VECTOR, VECTOR)), [X]),
    "largest": (lambda x: (x.topk(2).values, x.gather(1, (-x).topk(6).indices), x[:, ::2].topk(1)[0] + 1), [X]),
    "experts": (lambda x: (EXPERTS(x, x.topk(2).indices), EXPERTS(x.t().contiguous().t(), x.topk(3)[1])), [X]),
    "int4 experts": (lambda x: (EXPERTS_INT4(x, x.topk(2).indices),), [X]),
    "linear": (lambda x: (F.linear(x, WEIGHT), F.linear(x, WEIGHT, WEIGHT[:, 0]), x @ WEIGHT.t()), [X]),
    "other side": (lambda x: (x @ WEIGHT, x.t().unsqueeze(0) @ x[:, :2].unsqueeze(0)), [(3, 7)]),
    "rows": (lambda i, x: (F.embedding(i, TABLE) + x,), [(2, 3), (3, 6)]),
    "in place": (lambda x: ((x + 1).mul_(2).sub_(x).sigmoid_(), (x * 1).transpose_(0, 1) + 1), [X]),
    "planes": (lambda z: (z.real * 2, torch.complex(z.imag + 0, z.real * 2), torch.view_as_real(z) + 1), [Z]),
    "complex": (lambda z, x: (z * TURN, z * x, x * z, z * 2.0, z * (1 + 2j), z + z, z + x, z - z * 2, -z), [Z, X]),
    "complex, on": (lambda z, x: (z / x, z.sum(0), z.sum(), torch.stack([z, z], 1), torch.cat([z, z])), [Z, X]),
    "scan": (lambda x, h: (scan(VECTOR.expand(x.shape), x, h, False, "numba"),), [S, H]),
    "complex scan": (lambda x, h: (scan(TURN.expand(x.shape), x, h, False, "numba"),), [(*S, None), (*H, None)]),
    "delta rule": (delta_step, [(2, 1, 3, 19), (2, 3, 5, 7)]),
    "selective scan": (selective_steps, [(2, 1, 37), (2, 1, 37), (2, 5, 37)]),
    "selective scan of 4": (selective_steps, [(2, 4, 37), (2, 4, 37), (2, 5, 37)]),
    "gate loop": (fused_steps, [(2, 1, 6, 5), (2, 6, 1, None)]),
    "scan of 4": (lambda x, h: (scan(VECTOR.expand(x.shape), x, h, False, "numba"),), [(2, 4, 6), H]),
    "complex, of 4": (lambda z, h: (scan(z, z, h, False, "numba"),), [(2, 4, 6, None), (*H, None)]),
    "gate loop of 2": (fused_steps, [(2, 2, 6, 5), (2, 6, 1, None)]),
    "gate loop of 4": (fused_steps, [(1, 4, 6, 5), (1, 6, 1, None)]),
}  # fmt: skip


def drawn(name, shape):
    if name == "rows" and len(shape) == 2 and shape == (2, 3):
        return torch.randint(9, shape)
    is_complex = shape[-1] is None
    return torch.randn([size for size in shape if size is not None], dtype=torch.complex64 if is_complex else None)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_gives_what_torch_gives(name):
    step, shapes = STEPS[name]
    program = StepProgram(lower_step(step, [drawn(name, shape) for shape in shapes]))
    for _ in range(2):
        inputs = [drawn(name, shape) for shape in shapes]
        kept = [x.clone() for x in inputs]
        results, expected = program.run(inputs), step(*inputs)
        for result, right in zip(results, expected, strict=True):
            assert result.stride() == right.stride() or result.is_contiguous()
            torch.testing.assert_close(result, right, rtol=1e-5, atol=2e-6)
        assert all(map(torch.equal, inputs, kept))


def test_results_that_are_inputs_views_constants_or_one_another():
    def step(x):
        y = x + 1
        return y, y, y[1:], x, x.t(), VECTOR * 2, y.unsqueeze(0)

    program = StepProgram(lower_step(step, [torch.randn(3, 6)]))
    x = torch.randn(3, 6)
    first, second = program.run([x]), program.run([x])
    for result, right in zip(first, step(x), strict=True):
        assert torch.equal(result, right)
    addresses = [tensor.untyped_storage().data_ptr() for tensor in (*first, *second, x, VECTOR)]
    assert len(set(addresses)) == len(addresses)


def test_what_no_result_depends_on_is_left_out():
    def step(rows, x, h):
        unused = F.embedding(rows, TABLE) @ WEIGHT.t()
        states = scan(VECTOR.expand(h.shape), h, x, False, "numba")
        return unused, states

    def result(rows, x, h):
        return (step(rows, x, h)[1],)

    shapes = torch.zeros(2, dtype=torch.int64), torch.randn(2, 6), torch.randn(2, 4, 6)
    both, one = lower_step(step, shapes), lower_step(result, shapes)
    left = [instruction.opcode for instruction in one.instructions]
    assert left[0] == LOOK_UP
    assert LINEAR in {part.opcode for part in both.instructions}
    assert LINEAR not in left
    assert torch.equal(StepProgram(one).run(shapes)[0], StepProgram(both).run(shapes)[1])


def test_weights_and_what_follows_from_them_are_constants():
    weight, bias = torch.nn.Parameter(torch.randn(6)), torch.randn(6)

    def step(x):
        return x * (weight.exp() + bias), weight, torch.full((2,), 3.0)

    lowered = lower_step(step, [torch.randn(3, 6)])
    assert len(lowered.instructions) == 3  # one product and two copies
    x = torch.randn(3, 6)
    results = StepProgram(lowered).run([x])
    assert all(map(torch.equal, results, step(x)))
    assert results[1].data_ptr() != weight.data_ptr()


def test_a_parameter_whose_memory_is_exchanged_stays_readable():
    parameter = torch.nn.Parameter(torch.randn(1000, 6))
    kept = parameter.detach().clone()
    program = StepProgram(lower_step(lambda i: (F.embedding(i, parameter),), [torch.tensor([0])]))
    parameter.data = torch.zeros(1)
    torch.randn(1000, 6)  # would take the place of what was freed
    assert torch.equal(program.run([torch.tensor([5])])[0], kept[5:6])


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda x: (x.cumprod(0),), r"no instruction for aten\.cumprod"),
        (lambda x: (x.cumsum(0),), "running sums of 3 numbers"),
        (lambda x: (x.double(),), r"turned from torch\.float32 into torch\.float64"),
        (lambda x: (x.double() + 1,), "torch.float"),
        (lambda x: (x.add(x, alpha=2),), "a sum or a difference has a factor"),
        (lambda x: (x**3,), "a power of 3"),
        (lambda x: (F.softplus(x, beta=2),), "a softplus has a factor"),
        (lambda x: (x + torch.rand(6),), "draws random numbers"),
        (lambda x: (x.mul_(2),), "changes a constant or its input"),
        (lambda x: (x * float(x[0, 0]),), "gives a number that depends on the step"),
        (lambda x: (torch.complex(x, x).conj() * 2,), "conjugated"),
        (lambda x: (torch.complex(x, x).mul_(torch.complex(x, x)),), "changes tensors"),
        (lambda x: (1 / torch.complex(x, x),), "no instruction|complex"),
        (lambda x: (F.pad(x, (-1, 0)),), "negative padding"),
        (lambda x: (torch.native_layer_norm(x, (6,), None, None, 1e-5)[1] + 1,), "uses a result that no instruction"),
        (lambda x: (x * torch.ones(6, device="meta"),), "cannot be compiled|on meta"),
        (lambda x: (x.new_zeros(3, dtype=torch.int64) + x[0, :3],), r"a tensor is torch\.int64"),
        (lambda x: (x > 0,), "result that no instruction gives|torch.bool"),
        (lambda x: (torch.where(x > 1, x, x + 1),), "a comparison with another number than 0"),
        (lambda x: (torch.where(TABLE[:3] > 0, x, x + 1),), "a choice that is not between numbers above 0"),
        (lambda x: x.topk(2, largest=False)[:1], "a choice of the smallest numbers"),
        (lambda x: x.topk(2, 0)[:1], "along other dimensions than the last"),
        (lambda x: (x.gather(0, x[:, :3].topk(2).indices),), "numbers gathered from more than rows"),
        (lambda x: (EXPERTS(torch.cat([x] * 30), torch.cat([x] * 30).topk(2)[1]),), "180 choices of experts"),
        (lambda x: torch.var_mean(x, 0), "no instruction for aten.var_mean"),
    ],
)
def test_steps_that_have_no_instructions(step, message):
    with pytest.raises(StepNotCompiled, match=message):
        lower_step(step, [torch.randn(3, 6)])


def test_recurrences_that_are_not_written_step_by_step():
    with pytest.raises(StepNotCompiled, match="a scan that begins at the last step"):
        lower_step(lambda x: (scan(x, x, x[:, 0], True, "numba"),), [torch.randn(2, 3, 6)])
    with pytest.raises(StepNotCompiled, match="a delta rule of 3 steps"):
        lower_step(delta_step, [torch.randn(2, 3, 3, 19), torch.randn(2, 3, 5, 7)])
