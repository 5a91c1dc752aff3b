"""What holds for every registered operator: torch's own checks, FLOPs, gradients of the bare operator, refusals."""

import pytest
import torch
from torch.func import jvp
from torch.utils.flop_counter import FlopCounterMode

import recurra.decoding.linear
import recurra.ops.cells.orthogonal
import recurra.ops.delta_rule.generalised
import recurra.ops.selective_scan.operator  # noqa: F401
from recurra.ops._operator import _hand_over_formulas
from recurra.ops.delta_rule import reference as delta_modes
from recurra.ops.gate_loop.fused import Planes, _fused_reference
from recurra.ops.gate_loop.reference import recurrent
from recurra.ops.scan.reference import linear_scan_reference, matrix_scan
from recurra.ops.selective_scan.reference import at_once

ops = torch.ops.recurra
IN_TRITON_ALONE = {  # tests/ops/gate_loop/interpreted_triton_chunk.py, tests/ops/delta_rule/interpreted_triton.py
    *("gate_loop_chunk", "gate_loop_chunk_backward", "delta_rule_chunk", "delta_rule_chunk_backward"),
}
OF_THE_EXPORT = {"complex_scan"}
OF_TRACES = {  # tests/contracts/test_any_length.py; two of them are here too
    *("channel_modes", "convolve_window", "expert_outputs", "gate_loop_softmax_attention", "gru_cell_steps"),
    *("gate_loop_step", "gru_steps"),
    *("reformer_attention", "relative_attention", "slstm_steps", "windowed_attention"),
}
OF_TRACES |= {f"{name}_backward" for name in {*OF_TRACES, "delta_rule", "generalised_delta_rule", "matrix_scan"}}


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype).mul(0.6)


def of_scan(dtype=torch.float32):
    return [draw(2, 5, 7, dtype=dtype), draw(2, 5, 7, dtype=dtype), draw(2, 7, dtype=dtype), True]


def of_fused(planes=2, number=torch.float32, keep=True):
    a, state = ([draw(*shape), draw(*shape)][:planes] + [None] * (2 - planes) for shape in ((2, 5, 7), (2, 7)))
    return [*(draw(2, 5, 7).to(number) for _ in "qkv"), *a, *state, keep]


def of_fused_backward():
    *inputs, _ = of_fused()
    return [draw(2, 5, 7), None, draw(2, 5, 7), draw(2, 7), None, *inputs, draw(2, 5, 7), draw(2, 5, 7)]


def of_complex(keep=True):
    return [*(draw(2, 5, 7) for _ in "qkv"), draw(2, 5, 7, dtype=torch.cfloat), draw(2, 7, dtype=torch.cfloat), keep]


def of_complex_backward():
    *inputs, _ = of_complex()
    return [draw(2, 5, 7, dtype=torch.cfloat), None, *inputs, draw(2, 5, 7, dtype=torch.cfloat)]


def of_heads(keep=True):
    return [draw(2, 35, 2, 5), draw(2, 35, 2, 5), draw(2, 35, 2, 6), draw(2, 35, 2, 5), draw(2, 2, 5, 6), keep]


def of_heads_backward(with_gates=True):
    q, k, v, a, *_ = of_heads()
    return [draw(2, 35, 2, 6), None, q, k, v, a, draw(2, 20, 6), with_gates]


def of_selective():
    return [draw(2, 20, 24), draw(2, 20, 24), -draw(24, 3).abs(), draw(2, 20, 3), draw(2, 20, 3), draw(2, 3, 24)]


def of_delta_rule(d_a=1):
    q, a = draw(2, 5, 2, 3), draw(2, 5, 2, d_a)
    return [q, draw(2, 5, 2, 3), draw(2, 5, 2, 7), a, draw(2, 5, 2, 1), draw(2, 2, 3, 7)]


def of_delta_rule_backward(d_a=1):
    return [draw(2, 5, 2, 7), None, *of_delta_rule(d_a), draw(2, 5, 2, 7), draw(2, 6, 7)]


def of_generalised():
    keys, write = ([draw(2, 5, 2, 3) for _ in range(n)] for n in (2, 3))
    return [*keys, draw(2, 5, 2, 7), *write, draw(2, 2, 3, 7)]


def of_generalised_backward():
    return [draw(2, 5, 2, 7), None, *of_generalised(), draw(2, 5, 2, 7), draw(2, 6, 7)]


def of_neumann():
    buffers = [torch.zeros(6), torch.zeros(6), torch.zeros((), dtype=torch.int64), torch.eye(4), torch.eye(4)]
    return [draw(6), *buffers, 2, 100, 1e-6]


def of_experts():
    chosen = torch.tensor([[0, 3], [3, 1], [2, 0]])
    return [draw(3, 5), draw(4, 14, 5), draw(4, 14), draw(4, 5, 7), draw(4, 5), chosen, True]


CASES = {
    "linear_scan": (of_scan, 2 * 70),
    "linear_scan, complex": (lambda: of_scan(torch.complex64), 2 * 70),
    "linear_scan_backward": (lambda: [draw(2, 5, 7), *of_scan()], 3 * 70),
    "gate_loop_fused": (of_fused, 9 * 70),
    "gate_loop_fused, real": (lambda: of_fused(1, keep=False), 4 * 70),
    "gate_loop_fused, bfloat16": (lambda: of_fused(2, torch.bfloat16, False), 9 * 70),
    "gate_loop_fused_backward": (of_fused_backward, 19 * 70),
    "gate_loop_complex": (of_complex, 10 * 70),
    "gate_loop_complex, nothing kept": (lambda: of_complex(False), 10 * 70),
    "gate_loop_complex_backward": (of_complex_backward, 22 * 70),
    "gate_loop_heads": (of_heads, 5 * 140 * 30),
    "gate_loop_heads, nothing kept": (lambda: of_heads(False), 5 * 140 * 30),
    "gate_loop_heads_backward": (of_heads_backward, 14 * 140 * 30),
    "gate_loop_heads_backward, without gates": (lambda: of_heads_backward(False), 14 * 140 * 30),
    "selective_scan": (lambda: [*of_selective(), True], 4 * 960 * 3),
    "selective_scan_backward": (
        lambda: [draw(2, 20, 24), draw(2, 3, 24), *of_selective(), draw(2, 6, 24)], 14 * 960 * 3
    ),
    "delta_rule_fused": (of_delta_rule, 6 * 60 * 7),
    "delta_rule_fused, states kept": (lambda: [*of_delta_rule(), True], 6 * 60 * 7),
    "delta_rule_fused, decays by channel": (lambda: of_delta_rule(3), 6 * 60 * 7),
    "delta_rule_fused_backward": (of_delta_rule_backward, 16 * 60 * 7),
    "delta_rule_fused_backward, decays by channel": (lambda: of_delta_rule_backward(3), 16 * 60 * 7),
    "generalised_delta_rule_fused": (of_generalised, 8 * 60 * 7),
    "generalised_delta_rule_fused, states kept": (lambda: [*of_generalised(), True], 8 * 60 * 7),
    "generalised_delta_rule_fused_backward": (of_generalised_backward, 22 * 60 * 7),
    "generalised_delta_rule": (of_generalised, 0),
    "delta_rule": (of_delta_rule, 0),  # of traces, where nobody counts
    "matrix_scan": (lambda: [draw(3, 3), draw(2, 5, 3), draw(2, 3)], 0),
    "decoding_linear": (lambda: [draw(3, 5), draw(7, 5), draw(7), draw(7)], 0),
    "decoding_experts": (of_experts, 0),
    "neumann_inverse": (of_neumann, 2 * 64 * 3),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request):
    make, flops = CASES[request.param]
    return getattr(ops, request.param.partition(",")[0]).default, make(), flops


def test_every_operator_is_here():
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("recurra::")}
    here = {f"recurra::{name.partition(',')[0]}" for name in CASES}
    assert names - {f"recurra::{name}" for name in IN_TRITON_ALONE | OF_THE_EXPORT | OF_TRACES} == here


def test_torchs_own_checks(case, request):
    """In full once an operator, and for each of its other forms what depends on the arguments."""
    operator, arguments, _ = case
    checks = {"test_utils": ("test_schema", "test_faketensor")} if "," in request.node.name else {}
    torch.library.opcheck(operator, tuple(arguments), **checks)


def test_flops(case):
    operator, arguments, flops = case
    _hand_over_formulas()  # as every public function does; these calls bypass them
    with FlopCounterMode(display=False) as counted:
        operator(*arguments)
    assert counted.get_total_flops() == flops


IN_PLAIN_TORCH = {"delta_rule", "generalised_delta_rule", "matrix_scan", "neumann_inverse"}


CHANGES = {
    "size": lambda x: torch.cat([x, x[..., :1]], -1),
    "type": lambda x: torch.zeros(x.shape, dtype=torch.float16),
    "batch": lambda x: x[:1],
    "dimensions": lambda x: x[None],
    "device": lambda x: x.to("meta"),
}
LIKE = {"linear_scan": "b", "linear_scan_backward": "h", "selective_scan": "x", "selective_scan_backward": "x"}
"""The argument that others are compared with, "q" where it is not here."""


CHANGED = [
    (name, change)
    for name in CASES
    for change in (("size", "type") if name.startswith("decoding") else CHANGES)  # which take other batches
    if name.partition(",")[0] not in IN_PLAIN_TORCH
]


@pytest.mark.parametrize(("name", "change"), CHANGED)
def test_a_kernel_takes_no_address_of_another_tensor(name, change):
    """Each argument that differs is refused, by its name unless others have its size or are compared with it."""
    operator, arguments = getattr(ops, name.partition(",")[0]).default, CASES[name][0]()
    like, decodes = LIKE.get(name.partition(",")[0], "q"), name.startswith("decoding")
    for place, (argument, known) in enumerate(zip(arguments, operator._schema.arguments)):
        if isinstance(argument, torch.Tensor) and not (change == "size" and argument.dtype == torch.int64):
            is_named = change != "size" and known.name != like and not decodes
            with pytest.raises(ValueError, match=f"^{known.name} is .*; expected " if is_named else "expected"):
                operator(*arguments[:place], CHANGES[change](argument), *arguments[place + 1 :])


def test_forward_derivatives_are_refused_rather_than_lost(case):
    operator, arguments, _ = case
    first, *rest = arguments
    with pytest.raises(NotImplementedError, match="no derivative"):
        jvp(lambda first: operator(first, *rest), (first,), (first,))


def by_complex(q, k, v, a, x0, _):
    h = linear_scan_reference(a, (k * v).to(a.dtype), x0, reverse=False)
    return q * h, h[:, -1]


def by_planes(q, k, v, a_re, a_im, x0_re, x0_im, _):
    y, states, _ = _fused_reference(q, k, v, Planes(a_re, a_im), Planes(x0_re, x0_im))
    return [y, *(plane for plane in states if plane is not None)]


RECORDED = {
    "linear_scan": (of_scan, lambda a, b, h0, _: [linear_scan_reference(a, b, h0, True)]),
    "gate_loop_fused": (of_fused, by_planes),
    "gate_loop_fused, the last state alone": (
        lambda: of_fused(1, keep=False), lambda *x: [y if n == 0 else y[:, -1:] for n, y in enumerate(by_planes(*x))]
    ),
    "gate_loop_complex": (of_complex, by_complex),
    "gate_loop_complex, nothing kept": (lambda: of_complex(False), by_complex),
    "gate_loop_heads": (of_heads, lambda *x: recurrent(*x[:5], "reference")),
    "delta_rule_fused": (of_delta_rule, delta_modes.recurrent),
    "delta_rule": (of_delta_rule, delta_modes.recurrent),
    "generalised_delta_rule_fused": (of_generalised, delta_modes.generalised_recurrent),
    "generalised_delta_rule": (of_generalised, delta_modes.generalised_recurrent),
    "selective_scan": (CASES["selective_scan"][0], lambda *x: at_once(*x[:6])),
    "matrix_scan": (CASES["matrix_scan"][0], lambda *x: [matrix_scan(*x)]),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_a_bare_operator_records_a_gradient(name):
    """As in a program of torch.export, which may run with gradients on."""
    make, reference = RECORDED[name]
    arguments = [x.requires_grad_() if isinstance(x, torch.Tensor) else x for x in make()]
    leaves, found = [x for x in arguments if isinstance(x, torch.Tensor)], []
    expected = reference(*arguments)
    actual = getattr(ops, name.partition(",")[0])(*arguments)
    for outputs in (expected, [actual] if isinstance(actual, torch.Tensor) else actual[: len(expected)]):
        found.append(torch.autograd.grad(sum((y * y.conj()).real.sum() for y in outputs), leaves))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", RECORDED)
def test_a_bare_operator_that_records_a_gradient_takes_no_other_tensor_either(name, change):
    operator, arguments = getattr(ops, name.partition(",")[0]).default, RECORDED[name][0]()
    if operator._schema.name.removeprefix("recurra::") in IN_PLAIN_TORCH:
        pytest.skip("no kernel")
    arguments = [x.requires_grad_() if isinstance(x, torch.Tensor) else x for x in arguments]
    for place, x in enumerate(arguments):
        if isinstance(x, torch.Tensor):
            with pytest.raises(ValueError, match="expected"):
                operator(*arguments[:place], CHANGES[change](x.detach()), *arguments[place + 1 :])


@pytest.mark.parametrize("name", ["linear_scan_backward", "decoding_linear"])
def test_without_a_rule_a_gradient_is_refused_rather_than_lost(name):
    first, *rest = CASES[name][0]()
    with pytest.raises(NotImplementedError, match=r"no derivative .* in a traced program: differentiate the model"):
        getattr(ops, name)(first.requires_grad_(), *rest)
    with torch.no_grad():
        getattr(ops, name)(first, *rest)
