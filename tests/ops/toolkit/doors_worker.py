"""Calls that must not reach a kernel, made in a process of their own, because without the checks most of them crash it.

Each printed line is a case's name, a tab, and the result of the call. test_doors.py runs this file and reads them.
"""

import faulthandler
import itertools

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import recurra
from recurra.decoding.linear import _decoding_linear
from recurra.layers.convolution import shifted_products
from recurra.layers.cross_entropy import cross_entropy
from recurra.layers.features import positive_features
from recurra.layers.norms import RMSNorm, gated
from recurra.layers.positions import turned
from recurra.ops.cells.gru import GRUCell, HiddenWeights, RecurrentWeights, gru_after, gru_sequence
from recurra.ops.cells.slstm import SLSTMParts, slstm_sequence
from recurra.ops.gate_loop.fused import Planes
from recurra.ops.gate_loop.operator import gate_loop, gate_loop_real_part

ops = torch.ops.recurra


def ones(*shape, **options):
    return torch.ones(shape, **options)


def wrong(x, is_shared):
    """Tensors that each differ from x in one way; what is not shared by all sequences may be of one alone."""
    cases = {"number of dimensions": x[None], "type": x.double(), "device": x.to("meta")}
    return cases if is_shared else cases | {"batch": x[:1]}


def each_wrong(call, good, names, shared=(), promoted=()):
    """One case for each argument in `names`, which is replaced by what it must not be; `promoted` may have any type."""
    cases = {}
    for name in names:
        for kind, tensor in wrong(good[name], name in shared).items():
            if kind != "type" or name not in promoted:
                arguments = good | {name: tensor}
                cases[f"{name} of another {kind}"] = (lambda arguments=arguments: call(**arguments), name)
    return cases


def in_order(operator, *options):
    return lambda **given: operator(*given.values(), *options)


def of_scan():
    half = ones(4, 6, 70).half()
    return {
        "everything half": (lambda: ops.linear_scan(half, half, half[:, 0], False), "b"),
        "b without channels": (lambda: ops.linear_scan(ones(4, 6), ones(4, 6), ones(4), False), "b"),
        "front door, h0": (lambda: recurra.linear_scan(ones(4, 6, 70), ones(4, 6, 70), ones(1, 70)), "h0"),
    }


def of_out():
    memory = torch.zeros(4 * 6 * 70 + 1000)
    out, apart = memory[:1680].view(4, 6, 70), {"a": ones(4, 6, 70), "b": ones(4, 6, 70), "h0": ones(4, 70)}
    call = lambda **given: recurra.linear_scan(*given.values(), out=out)  # noqa: E731
    shifted = {
        "shifted by a step": memory[70:1750].view(4, 6, 70),
        "shifted by a number": memory[1:1681].view(4, 6, 70),
    }
    shifted["in another order"] = memory[:1680].view(4, 70, 6).mT
    return {
        f"out is {name} {kind}": (lambda n=name, t=tensor: call(**apart | {n: t}), "out")
        for name in "ab"
        for kind, tensor in shifted.items()
    } | {"out is one step of a": (lambda: call(**apart | {"a": memory[140:280].view(2, 70)[1]}), "out")}


def of_fused():
    x = {name: ones(4, 6, 70) for name in ("q", "k", "v", "a_re", "a_im")}
    x |= {name: ones(4, 70) for name in ("x0_re", "x0_im")}
    call = in_order(ops.gate_loop_fused, True)
    cases = {}
    for name in ("a_re", "a_im", "x0_re", "x0_im"):
        cases[f"{name} of complex numbers"] = (lambda name=name: call(**x | {name: x[name] + 0j}), name)
    cases["x0_im left out"] = (lambda: call(**x | {"x0_im": None}), "x0_im")
    cases["a_im left out"] = (lambda: call(**x | {"a_im": None}), "x0_im")
    cases["q of half precision"] = (lambda: call(**x | {n: x[n].half() for n in "qkv"}), "q")
    wide = {n: x[n].double() for n in ("a_re", "a_im", "x0_re", "x0_im")}
    cases["gates wider than q"] = (lambda: call(**x | wide), "a_re")
    cases["no steps"] = (lambda: call(**{n: t[:, :0] if t.dim() == 3 else t for n, t in x.items()}), "q")
    given = dict.fromkeys(("dy", "dh_re", "dh_im", "dlast_re", "dlast_im"))
    given |= x | {"h_re": ones(4, 6, 70), "h_im": ones(4, 6, 70)}
    back = in_order(ops.gate_loop_fused_backward)
    cases["backward, h_re of the last step"] = (lambda: back(**given | {"h_re": ones(4, 1, 70)}), "h_re")
    real = given | {"dh_im": ones(4, 6, 70), "a_im": None, "x0_im": None, "h_im": ones(0)}
    return cases | {"backward, dh_im of what is real": (lambda: back(**real), "dh_im")}


def of_complex():
    x = [*(ones(4, 6, 70) for _ in "qkv"), ones(4, 6, 70) + 0j, ones(4, 70) + 0j]
    return {
        "q of half precision": (lambda: ops.gate_loop_complex(*(t.half() for t in x), True), "q"),
        "real gates": (lambda: ops.gate_loop_complex(*(t.real for t in x), True), "a"),
    }


def of_chunk():
    """The operators with Triton's kernels for heads; the others are in test_operator.py."""
    x, a, state, wide = ones(2, 5, 3, 4), ones(2, 5, 3, 1), ones(2, 3, 4, 4), ones(2, 5, 3, 200)
    good = {"q": x, "k": x, "v": ones(2, 5, 3, 6), "a": a, "state": ones(2, 3, 4, 6)}
    given = {"dy": ones(2, 5, 3, 6), "dlast": good["state"]} | good
    names, promoted = [name for name in given if name != "q"], ("a",)  # it is the state that is of another type then
    backward = each_wrong(in_order(ops.gate_loop_chunk_backward), given, names, promoted=promoted)
    integers = [tensor.long() for tensor in good.values()]
    return {
        **each_wrong(in_order(ops.gate_loop_chunk), good, ("k", "v", "a", "state"), promoted=promoted),
        **{f"backward, {name}": it for name, it in backward.items()},
        "everything integers": (lambda: ops.gate_loop_chunk(*integers), "q"),
        "integers by heads": (lambda: ops.gate_loop_heads(*integers, True), "q"),
        "gates of half precision": (lambda: ops.gate_loop_chunk(x, x, x, a.half(), state), "a"),
        "complex inputs beside real gates": (lambda: ops.gate_loop_chunk(*[x + 0j] * 3, a, state), "q"),
        "heads too wide": (lambda: ops.gate_loop_chunk(wide, wide, wide, a, ones(2, 3, 200, 200)), "d_qk"),
    }


def of_the_front_doors():
    good = {name: ones(64, 7, 8, 1) for name in ("q", "k", "v", "re", "im")} | {"state": ones(64, 8, 1, 1) + 0j}

    def real_part(records=True, **changes):
        x = {n: None if t is None else t.detach().requires_grad_(records) for n, t in (good | changes).items()}
        y, last = gate_loop_real_part(*(x[n] for n in "qkv"), Planes(x["re"], x["im"]), state=x["state"])
        if records:
            (y.sum() + last.abs().sum()).backward()

    cases = {"real, a complex state beside real gates": (lambda: real_part(im=None), "state")}
    for name, argument in {"k": "k", "v": "v", "re": "a.re", "im": "a.im", "state": "state"}.items():
        for records in (True, False):
            what = f"real, {name}" if records else f"real without gradients, {name}"
            wrong = {"batch": good[name][:1], "device": good[name].to("meta")}
            for kind, tensor in wrong.items():
                call = lambda n=name, t=tensor, r=records: real_part(r, **{n: t})  # noqa: E731
                cases[f"{what} of another {kind}"] = (call, argument)
    for mode in ("recurrent", "scan", "chunk", "attention", "fused"):
        for kind, state in {"batch": ones(1, 8, 1, 1), "device": ones(64, 8, 1, 1, device="meta")}.items():
            call = lambda mode=mode, state=state: gate_loop(*[good["q"]] * 4, state=state, mode=mode)  # noqa: E731
            cases[f"{mode}, a state of another {kind}"] = (call, "state")
    return cases


def of_products():
    x = {"x": ones(2, 5), "weight": ones(3, 5), "scale": ones(3), "bias": ones(3)}
    call = lambda **given: _decoding_linear(*given.values())  # noqa: E731
    cases = each_wrong(call, x, ("scale", "bias"), shared=x)
    weights = {
        "of another type": ones(3, 5).double(),
        "in another layout": ones(5, 3).t(),
        "of int8 in rows": ones(3, 5, dtype=torch.int8),
        "in panels of 63": ones(1, 5, 63, dtype=torch.bfloat16),
        "in groups of 1,279 bytes": ones(1, 1, 1279, dtype=torch.uint8),
    }
    cases |= {f"weight {kind}": (lambda w=w: call(**x | {"weight": w}), "weight") for kind, w in weights.items()}
    for name in ("scale", "bias"):
        cases[f"{name} with gaps"] = (lambda name=name: call(**x | {name: ones(6)[::2]}), name)
    cases["x of another width"] = (lambda: call(**x | {"x": ones(2, 4)}), "x")
    return cases


def of_layers():
    features = {"q": ones(4, 6, 2, 5), "k": ones(4, 6, 2, 5), "less": ones(4, 6, 2), "start": ones(4, 2, 5)}
    turning = {"b": ones(4, 6, 2, 8), "c": ones(4, 6, 2, 8), "angles": ones(4, 6, 2, 3), "scale": ones(4, 6, 2, 1)}
    shifted = {"x": ones(4, 6, 5), "state": ones(4, 3, 5), "weight": ones(4, 5), "bias": ones(5)}
    cases = {
        "features": each_wrong(positive_features, features, [*features][1:]),
        "turned": each_wrong(turned, turning, [*turning][1:]),
        "shifted": each_wrong(shifted_products, shifted, [*shifted][1:], shared=("weight", "bias")),
    }
    return {f"{layer}, {name}": it for layer, found in cases.items() for name, it in found.items()}


def of_cells():
    x = {"projected": ones(4, 6, 15), "h": ones(4, 5), "gates": ones(10, 5), "candidate": ones(5, 5)}

    def gru(projected, h, gates, candidate):
        weights = RecurrentWeights(gates.requires_grad_(gates.is_floating_point()), candidate)
        y, last = gru_sequence(GRUCell(2, 5), projected, h, weights)
        (y.sum() + last.sum()).backward()

    cases = {
        f"GRU, {case}": (call, {"gates": "weights.gates", "candidate": "weights.candidate"}.get(name, name))
        for case, (call, name) in each_wrong(gru, x, ("h", "gates", "candidate"), promoted="h").items()
    }
    cases["GRU, projected of another width"] = (lambda: gru(**x | {"projected": ones(4, 6, 14)}), "projected")
    parts = {name: ones(4, 2, 5) for name in SLSTMParts._fields}
    given = {"projected": ones(4, 6, 4, 2, 5), "weights": ones(2, 5, 20)} | parts

    def slstm(projected, weights, **state):
        y, last = slstm_sequence(projected, weights.requires_grad_(weights.is_floating_point()), SLSTMParts(**state))
        (y.sum() + last.c.sum()).backward()

    cases["sLSTM, three gates"] = (lambda: slstm(**given | {"projected": ones(4, 6, 3, 2, 5)}), "projected")
    return cases | {
        f"sLSTM, {case}": (call, f"state.{name}" if name in parts else name)
        for case, (call, name) in each_wrong(slstm, given, ("weights", *parts)).items()
    }


def of_saved_tensors():
    """What a hook has made of a saved tensor, by its place among them: of half the bytes, or with one number alone."""
    slstm = [ones(4, 6, 4, 2, 5), ones(2, 5, 20), *(ones(4, 2, 5) for _ in SLSTMParts._fields)]
    rotated = [ones(4, 6, 2, 8), ones(4, 6, 2, 8), ones(4, 6, 2, 3), ones(4, 6, 2, 1)]
    again = lambda a, b, h0: torch.autograd.grad(recurra.linear_scan(a, b, h0).sum(), a, create_graph=True)[0]  # noqa: E731
    calls = {
        "scan, differentiated again": (again, [ones(4, 6, 70), ones(4, 6, 70), ones(4, 70)], range(3), range(3)),
        "shifted products": (shifted_products, [ones(4, 6, 5), ones(4, 3, 5), ones(4, 5), ones(5)], range(4), range(4)),
        "gated": (
            lambda y, z, u, skip: gated(y, z, RMSNorm(3), skip=(u, skip)),
            [ones(4, 5, 6), ones(4, 5, 6), ones(4, 5, 6), ones(6)],
            range(6),
            range(6),
        ),
        "sLSTM": (lambda p, w, *state: slstm_sequence(p, w, SLSTMParts(*state))[0], slstm, range(8), range(8)),
        "turned": (lambda *x: sum(part.sum() for part in turned(*x)), rotated, range(5), range(5)),
        "cross-entropy": (cross_entropy, [ones(6, 9), torch.arange(6)], (2, 3), (2, 3)),
        "GRU": (
            lambda p, h, *w: gru_sequence(GRUCell(2, 5), p, h, RecurrentWeights(*w))[0],
            [ones(4, 6, 15), ones(4, 5), ones(10, 5), ones(5, 5)],
            (4, 5, 7),
            (2, 3, 4, 7),
        ),
        "scan in half precision": (
            recurra.linear_scan,
            [ones(4, 6, 70).half(), ones(4, 6, 70).half(), ones(4, 70).half()],
            (0, 1, 2),
            (0, 1, 2),
        ),
        "GRU, reset after": (
            lambda p, h, *w: gru_after(p, h, HiddenWeights(*w))[0],
            [ones(4, 6, 15), ones(4, 5), ones(15, 5), ones(15)],
            (4, 5, 6, 7),
            (2, 4, 6, 7),
        ),
    }
    changes = {"type": Tensor.bfloat16, "shape": lambda x: x.flatten()[:1]}
    return {
        f"{name}, {change} of number {number}": (
            lambda call=call, x=x, number=number, how=how: hooked(call, x, number, how),
            "",
        )
        for name, (call, x, *numbers) in calls.items()
        for (change, how), those in zip(changes.items(), numbers)
        for number in those
    }


def hooked(call, x, number, change):
    saved = itertools.count()
    x = [t.requires_grad_(t.is_floating_point()) for t in x]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: change(t) if next(saved) == number else t, lambda t: t):
        y = call(*x)
    assert next(saved) > number
    y.sum().backward()


def of_fake_results():
    """Tensors without memory, which would have to be written into; nothing may refuse them, or end the process."""

    def call(**options):
        with FakeTensorMode(), torch.no_grad():
            b = ones(2, 4, 80)
            out = torch.empty(2, 4, 80)
            found = recurra.linear_scan(b * 0.5, b, out=out, **options)
        if found is out and found.shape == (2, 4, 80):
            raise ValueError("out is fake; expected nothing else")

    return {"out": (call, "out"), "out, reverse": (lambda: call(reverse=True), "out")}


ROOMS = {
    "scan": of_scan, "out": of_out, "fused": of_fused, "complex": of_complex, "chunk": of_chunk,
    "front": of_the_front_doors, "products": of_products, "layers": of_layers, "cells": of_cells,
    "saved": of_saved_tensors, "fake": of_fake_results,
}  # fmt: skip


def main():
    faulthandler.enable()
    for room, cases in ROOMS.items():
        for case, (call, argument) in cases().items():
            name = f"{room}: {case}"
            print(name, end="\t", flush=True)
            try:
                call()
            except ValueError as error:
                says = str(error)
                is_named = (not argument or says.startswith(f"{argument} is ")) and "; expected " in says
                print("refused" if is_named else f"refused, but not by name ({argument}): {says!r}", flush=True)
            except Exception as error:
                print(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
            else:
                print("went through", flush=True)


if __name__ == "__main__":
    main()
