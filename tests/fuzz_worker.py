"""Random calls of every operator with a kernel, in any memory layout, compared with plain torch in double precision.

test_fuzz.py runs this file in a process of its own. Every case is printed before it runs, so that the last line names
the one that ended the process. Inputs lie in a sea of NaN: a kernel that reads past a tensor spoils its result.
"""

import faulthandler
import sys

import torch

import recurra
from fuzz_case import TOLERANCES, Case, wide
from recurra.decoding._products import rounded
from recurra.decoding.linear import _decoding_linear, _from_int4, _to_int4, _to_sets
from recurra.mixers.rnn import RNN, RNNState
from recurra.ops.cells.gru import GRUCell
from recurra.ops.cells.orthogonal import NCGRUCell
from recurra.ops.gate_loop.fused import Planes
from recurra.ops.gate_loop.operator import gate_loop_real_part
from recurra.ops.scan.reference import linear_scan_reference

ROWS = (1, 3, 17, 64, 100)  # channels: the kernels for narrow rows and for wide ones, with and without a rest
RIGHT = ["right"] * 9


# --- the scans ---


def plain_scan(a, b, h0=None, reverse=False):
    """The recurrence one step after the other, for any shapes that broadcast."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    h0 = b.new_zeros((b.shape[0], *b.shape[2:]), dtype=dtype) if h0 is None else h0
    if not b.numel():
        return a * b + h0.unsqueeze(1)
    return linear_scan_reference(a.expand(b.shape), b, h0, reverse)


def of_linear_scan(seed, dtype):
    case = Case(seed, "linear_scan", dtype)
    shape = (case.size("B", 3), case.size("L", 6), case.choose("D", (*ROWS, 0)))
    a = case.tensor("a", shape[case.choose("without", (0, 0, 1, 2)) :], dtype, gate=True)
    b = case.tensor("b", shape, dtype)
    h0, fits = case.state("h0", (shape[0], shape[2]), dtype)
    reverse = case.choose("reverse", (False, True))
    scan = lambda a, b, h0: (recurra.linear_scan(a, b, h0, reverse=reverse),)  # noqa: E731
    if not fits:
        return case.refused(lambda: scan(a, b, h0))
    return case.same(scan, lambda a, b, h0: (plain_scan(a, b, h0, reverse),), (a, b, h0))


def of_packed_scans(seed, dtype):
    case = Case(seed, "linear_scan of packed sequences", dtype)
    lengths = [case.size("L", 4) for _ in range(case.choose("N", (1, 2, 3)))]
    borders = torch.tensor([0, *lengths]).cumsum(0)
    total, channels = int(borders[-1]), case.choose("D", ROWS)
    a, b = case.tensor("a", (1, total, channels), dtype, gate=True), case.tensor("b", (1, total, channels), dtype)
    h0, fits = case.state("h0", (len(lengths), channels), dtype)
    scan = lambda a, b, h0: (recurra.linear_scan(a, b, h0, cu_seqlens=borders),)  # noqa: E731
    if not fits:
        return case.refused(lambda: scan(a, b, h0))

    def alone(a, b, h0):
        pieces = zip(a.split(lengths, 1), b.split(lengths, 1), h0.split(1))
        return (torch.cat([plain_scan(*piece) for piece in pieces], 1),)

    return case.same(scan, alone, (a, b, h0))


def of_out(seed, dtype):
    """out= anywhere in one piece of memory, in which a, b or h0 may lie, too: refused, or right and nothing else."""
    case = Case(seed, "linear_scan into out", dtype)
    shape = (case.choose("B", (1, 2)), case.choose("L", (1, 2, 5)), case.choose("D", ROWS))
    size = torch.Size(shape).numel()
    memory = torch.randn(4 * size + 64, dtype=dtype, generator=case.random)
    start = case.choose("start", (0, 7, size))
    out = memory[start : start + size].view(shape)
    inputs = {"a": case.tensor("a", shape, dtype, gate=True), "b": case.tensor("b", shape, dtype)}
    inputs["h0"] = case.tensor("h0", (shape[0], shape[2]), dtype)
    is_apart = True
    for name in case.choose("shared", ((), ("a",), ("b",), ("h0",), ("a", "b"))):
        other = start + case.choose(f"{name} from", (0, 0, 1, shape[2], size, 2 * size))
        kept = inputs[name].shape
        inputs[name] = memory[other : other + kept.numel()].view(kept)
        is_apart &= name == "h0" or other == start or other >= start + size
    case.say()
    right = plain_scan(*(wide(x) for x in inputs.values()))
    before = memory.clone()
    if not is_apart:
        case.refused(lambda: recurra.linear_scan(**inputs, out=out))
        assert torch.equal(memory, before), "refused, and yet written"
        return
    result = recurra.linear_scan(**inputs, out=out)
    assert result is out
    case.near("out", out, right)
    before[start : start + size] = out.flatten()
    assert torch.equal(memory, before), "it wrote outside of out"


def of_the_bare_backward(seed, dtype):
    case = Case(seed, "recurra::linear_scan_backward", dtype)
    shape = (case.size("B", 3), case.size("L", 4), case.choose("D", ROWS))
    tensors = {name: case.tensor(name, shape, dtype) for name in ("dh", "a", "h")}
    tensors["h0"] = case.tensor("h0", (shape[0], shape[2]), dtype)
    wrong = case.choose("wrong", (*RIGHT, *tensors))
    if wrong != "right":
        tensors[wrong] = case.unlike(tensors[wrong], torch.float64)
        return case.refused(lambda: torch.ops.recurra.linear_scan_backward(*tensors.values(), False))
    case.say()
    da, db, dh0 = torch.ops.recurra.linear_scan_backward(*tensors.values(), False)
    if not da.numel():
        return None
    dh, a, h, h0 = (wide(x) for x in tensors.values())
    later = torch.cat([a[:, 1:], torch.zeros_like(a[:, :1])], 1).conj()
    g = plain_scan(later, dh, None, True)
    case.near("db", db, g)
    case.near("da", da, g * torch.cat([h0.unsqueeze(1), h[:, :-1]], 1).conj())
    return case.near("dh0", dh0, g[:, 0] * a[:, 0].conj())


# --- the GateLoop ---


def plain_gate_loop(q, k, v, a, h):
    """GateLoop eq. (7)-(8) as written."""
    if 0 in (q.numel(), v.numel()):
        return (q * k * a).sum(-1, keepdim=True) * v, h + 0 * a.sum()
    outputs = []
    for t in range(q.shape[1]):
        h = a[:, t, :, :, None] * h + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append((q[:, t, :, :, None] * h).sum(-2))
    return torch.stack(outputs, 1), h


def of_gate_loop(seed, mode):
    case = Case(seed, "gate_loop", mode)
    steps = case.size("B", 3), case.size("L", 5), case.size("H", 3)
    d_qk, d_v = (1, 1) if mode == "fused" else (case.size("d_qk", 3), case.size("d_v", 3))
    gates = case.choose("gates", (torch.float32, torch.complex64))
    q, k = case.tensor("q", (*steps, d_qk)), case.tensor("k", (*steps, d_qk))
    v, a = case.tensor("v", (*steps, d_v)), case.tensor("a", (*steps, case.choose("d_a", (1, d_qk))), gates, gate=True)
    state, fits = case.state("state", (steps[0], steps[2], d_qk, d_v), gates)
    call = lambda q, k, v, a, state: recurra.gate_loop(q, k, v, a, state=state, mode=mode)  # noqa: E731
    if not fits:
        return case.refused(lambda: call(q, k, v, a, state))
    return case.same(call, plain_gate_loop, (q, k, v, a, state), 1e-4)


def plain_delta_rule(q, k, v, a, b, h):
    """h_t = (I - b_t k_t^T k_t) diag(a_t) h_{t-1} + b_t k_t^T v_t, y_t = q_t h_t."""
    if 0 in (q.numel(), v.numel()):
        return (q * k * a * b).sum(-1, keepdim=True) * v, h + 0 * a.sum()
    outputs = []
    for t in range(q.shape[1]):
        key, rate = k[:, t, :, :, None], b[:, t, :, :, None]
        h = a[:, t, :, :, None] * h
        h = h + rate * key * (v[:, t, :, None, :] - (key * h).sum(-2, keepdim=True))
        outputs.append((q[:, t, :, :, None] * h).sum(-2))
    return torch.stack(outputs, 1), h


def of_the_delta_rule(seed, mode):
    case = Case(seed, "delta_rule", mode)
    steps = case.size("B", 3), case.size("L", 5), case.size("H", 3)
    d_qk, d_v = case.size("d_qk", 3), case.size("d_v", 9)
    q, k, v = case.tensor("q", (*steps, d_qk)), case.tensor("k", (*steps, d_qk)), case.tensor("v", (*steps, d_v))
    a = case.tensor("a", (*steps, case.choose("d_a", (1, d_qk))), gate=True)
    b = case.tensor("b", (*steps, 1), gate=True)
    state, fits = case.state("state", (steps[0], steps[2], d_qk, d_v), torch.float32)
    call = lambda q, k, v, a, b, state: recurra.delta_rule(q, k, v, a, b, state, mode=mode)  # noqa: E731
    if not fits:
        return case.refused(lambda: call(q, k, v, a, b, state))
    return case.same(call, plain_delta_rule, (q, k, v, a, b, state), 1e-4)


def of_the_real_part(seed, number):
    case = Case(seed, "gate_loop_real_part", number)
    plane = torch.float64 if number == torch.float64 else torch.float32
    gates = case.choose("gates", (plane, plane.to_complex()))
    steps = (case.size("B", 3), case.size("L", 4), case.choose("H", (*ROWS, 0)), 1)
    q, k, v = (case.tensor(name, steps, number) for name in "qkv")
    re, im = (case.tensor(name, steps, plane, gate=True) for name in ("re", "im"))
    other = torch.float64 if plane == torch.float32 else torch.float32
    empty = not torch.Size(steps).numel()  # then it goes where types are promoted
    state, fits = case.state("state", (steps[0], steps[2], 1, 1), gates, torch.int64 if empty else other)

    def call(q, k, v, re, im, state):
        y, last = gate_loop_real_part(q, k, v, Planes(re, im if gates.is_complex else None), state=state)
        return y, last, im.sum()  # the last one for a gradient of its own where gates are real

    def right(q, k, v, re, im, state):
        y, last = plain_gate_loop(q, k, v, torch.complex(re, im) if gates.is_complex else re, state)
        return y.real if y.is_complex() else y, last, im.sum()

    if not fits:
        return case.refused(lambda: call(q, k, v, re, im, state))
    return case.same(call, right, (q, k, v, re, im, state), TOLERANCES[number])


# --- cells and decoding ---


def of_cells(seed, kind):
    case = Case(seed, "RNN", kind.__name__)
    n_in, hidden, batch, length = 2, case.choose("hidden", (1, 3, 17)), case.size("B", 3), case.size("L", 4)
    torch.manual_seed(0)
    rnn, exact = RNN(kind(n_in, hidden)), RNN(kind(n_in, hidden)).double()
    exact.load_state_dict(rnn.state_dict())
    x = case.tensor("x", (batch, length, n_in))
    h, fits = case.state("h", (batch, hidden), torch.float32)
    weights = list(rnn.parameters())

    def call(x, h):
        y, state = rnn(x, RNNState(h))
        return y, state.h

    def by_steps(x, h):
        outputs = []
        for t in range(length):
            h = exact.cell(x[:, t], h)
            outputs.append(h)
        return torch.stack(outputs, 1) if outputs else x[..., :1].expand(batch, 0, hidden), h

    if not fits:
        return case.refused(lambda: call(x, h))
    case.same(call, by_steps, (x, h), 1e-4)
    if not length:
        return None
    mine = torch.autograd.grad(sum(y.square().sum() for y in call(x, h)), weights, materialize_grads=True)
    right = by_steps(wide(x), wide(h))
    gradients = torch.autograd.grad(
        sum(y.square().sum() for y in right), list(exact.parameters()), materialize_grads=True
    )
    for i, (dw, exact_dw) in enumerate(zip(mine, gradients)):
        case.near(f"gradient of weight {i}", dw, exact_dw, 1e-4)
    return None


def of_decoding(seed, number):
    case = Case(seed, "recurra::decoding_linear", number)
    n_in, n_out = case.choose("n_in", (0, 1, 5, 16, 70, 130)), case.choose("n_out", (0, 1, 3, 40, 65))
    dense = 4 * torch.randn(n_out, n_in, generator=case.random)
    if number == torch.uint8:
        laid_out = _to_int4(dense)
        dense = _from_int4(laid_out, n_out, n_in)
    else:
        dense = dense.to(number)
        laid_out = dense.clone() if number == torch.float32 else _to_sets(dense, 4 // number.itemsize)
    weight = torch.full((laid_out.numel() + 64,), 100, dtype=number)[32 : 32 + laid_out.numel()].view(laid_out.shape)
    weight.copy_(laid_out)
    given = {"x": case.tensor("x", (case.size("rows", 9), n_in)), "weight": weight}
    given |= {name: torch.randn(n_out, generator=case.random) for name in ("scale", "bias")}
    wrong = case.choose("wrong", (*RIGHT, *given))
    if wrong == "x":
        x = given["x"]
        more = {torch.uint8: 128, torch.int8: 4}.get(number, 1)  # they cannot tell widths apart that end in one block
        others = {"width": torch.zeros(len(x), n_in + more), "type": x.double(), "device": x.to("meta")}
        given["x"] = others[case.choose("by", others)]
    elif wrong != "right":
        given[wrong] = case.unlike(given[wrong], torch.float64)
    if wrong != "right":
        return case.refused(lambda: _decoding_linear(*given.values()))
    case.say()
    x = given["x"].to(number) if number.is_floating_point else rounded(given["x"])
    exact = wide(x) @ dense.double().t() * given["scale"].double() + given["bias"].double()
    return case.near("y", _decoding_linear(*given.values()), exact, 1e-4)


SINGLE = (torch.float32, torch.complex64)
CHECKS = (
    (of_linear_scan, (*SINGLE, torch.float64), 60),
    (of_packed_scans, SINGLE, 40),
    (of_out, SINGLE, 80),
    (of_the_bare_backward, SINGLE, 50),
    (of_gate_loop, ("auto", "chunk", "fused"), 30),
    (of_the_delta_rule, ("auto", "chunk"), 30),
    (of_the_real_part, (torch.float32, torch.bfloat16, torch.float64), 50),
    (of_cells, (GRUCell, NCGRUCell), 30),
    (of_decoding, (torch.float32, torch.bfloat16, torch.int8, torch.uint8), 50),
)
"""What is checked, in which kinds, and how many examples of each."""


def main(share):
    """The same examples every time: plain draws, because Hypothesis took longer to choose a call than to make it."""
    faulthandler.enable()
    torch.set_num_threads(1)
    for check, kinds, examples in CHECKS:
        for kind in kinds:
            for example in range(examples // share):
                check(f"{check.__name__}, {kind}, {example}", kind)
        print("done", check.__name__, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
