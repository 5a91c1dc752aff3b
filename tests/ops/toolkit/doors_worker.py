"""Calls that must not reach a kernel, made in a process of their own, because without the checks most of them crash it.

Each printed line is a case's name, a tab, and the result of the call. test_doors.py runs this file and reads them.
"""

import faulthandler
import itertools

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import recurra.ops.delta_rule
from recurra.decoding.linear import _decoding_linear
from recurra.layers.convolution import shifted_products
from recurra.layers.cross_entropy import cross_entropy
from recurra.layers.features import positive_features
from recurra.layers.turned import turned
from recurra.ops.cells.gru import GRUCell, HiddenWeights, RecurrentWeights, gru_after, gru_sequence
from recurra.ops.cells.slstm import SLSTMParts, slstm_sequence
from recurra.ops.gate_loop.fused import Planes
from recurra.ops.gate_loop.operator import gate_loop, gate_loop_real_part
from recurra.ops.gate_loop.reference import softmax_attention
from recurra.ops.scan import operator as operators

scan, scan_back = torch.ops.recurra.linear_scan, torch.ops.recurra.linear_scan_backward
fused, fused_back = torch.ops.recurra.gate_loop_fused, torch.ops.recurra.gate_loop_fused_backward
chunk, chunk_back = torch.ops.recurra.gate_loop_chunk, torch.ops.recurra.gate_loop_chunk_backward


def ones(*shape, **options):
    return torch.ones(shape, **options)


SEQUENCES, STATE = (4, 6, 70), (4, 70)
OTHER_SHAPES = {"batch": (1, 6, 70), "length": (4, 5, 70), "channels": (4, 6, 69), "dimensions": (24, 70)}
OTHER_STATES = {"batch": (1, 70), "channels": (4, 71), "dimensions": (4, 1, 70)}


def wrong(shape, others, dtype=torch.float32):
    """Tensors that each differ from ones(*shape) in one way."""
    cases = {kind: ones(*other, dtype=dtype) for kind, other in others.items()}
    other_type = torch.float64 if dtype != torch.float64 else torch.float32
    return cases | {"type": ones(*shape, dtype=other_type), "device": ones(*shape, dtype=dtype, device="meta")}


def each_wrong(call, good, wrong_ones):
    """One case for each of `wrong_ones`, which replaces the argument of its name."""
    cases = {}
    for name, bad in wrong_ones.items():
        for kind, tensor in bad.items():
            arguments = good | {name: tensor}
            cases[f"{name} of another {kind}"] = (lambda arguments=arguments: call(**arguments), name)
    return cases


def of_scan():
    x = {"a": ones(*SEQUENCES), "b": ones(*SEQUENCES), "h0": ones(*STATE)}
    call = lambda **given: scan(*given.values(), False)  # noqa: E731
    cases = each_wrong(call, x, {"a": wrong(SEQUENCES, OTHER_SHAPES), "h0": wrong(STATE, OTHER_STATES)})
    for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.complex32):
        b = ones(*SEQUENCES).to(dtype)
        cases[f"everything {dtype}"] = (lambda b=b: scan(b, b, b[:, 0], False), "b")
    cases["b without channels"] = (lambda: scan(ones(4, 6), ones(4, 6), ones(4), False), "b")
    into = lambda h, **given: operators.scan_into(h, *given.values(), False)  # noqa: E731
    cases |= {
        f"scan_into, {case}": it for case, it in each_wrong(into, {"h": ones(*SEQUENCES)} | x, {
            "h": wrong(SEQUENCES, OTHER_SHAPES) | {"layout": ones(4, 6, 140)[..., ::2]},
            "a": wrong(SEQUENCES, OTHER_SHAPES),
            "h0": wrong(STATE, OTHER_STATES),
        }).items()
    }  # fmt: skip
    return cases


def of_scan_backward():
    x = {"dh": ones(*SEQUENCES), "a": ones(*SEQUENCES), "h": ones(*SEQUENCES), "h0": ones(*STATE)}
    call = lambda **given: scan_back(*given.values(), True)  # noqa: E731
    bad = {"dh": wrong(SEQUENCES, OTHER_SHAPES), "a": wrong(SEQUENCES, OTHER_SHAPES), "h0": wrong(STATE, OTHER_STATES)}
    cases = each_wrong(call, x, bad)
    half = ones(*SEQUENCES).half()
    return cases | {"everything half": (lambda: scan_back(half, half, half, half[:, 0], False), "h")}


FUSED = {name: ones(*SEQUENCES) for name in ("q", "k", "v", "a_re", "a_im")} | {
    name: ones(*STATE) for name in ("x0_re", "x0_im")
}


def wrong_fused():
    cases = {name: wrong(SEQUENCES, OTHER_SHAPES) for name in ("k", "v", "a_re", "a_im")}
    cases |= {name: wrong(STATE, OTHER_STATES) for name in ("x0_re", "x0_im")}
    for name in ("a_re", "a_im", "x0_re", "x0_im"):
        cases[name]["number"] = FUSED[name] + 0j
    return cases


def of_fused():
    call = lambda **given: fused(*given.values(), True)  # noqa: E731
    cases = each_wrong(call, FUSED, wrong_fused())
    cases["x0_im left out"] = (lambda: call(**FUSED | {"x0_im": None}), "x0_im")
    cases["a_im left out"] = (lambda: call(**FUSED | {"a_im": None}), "x0_im")
    cases["q of half precision"] = (lambda: call(**FUSED | {n: FUSED[n].half() for n in "qkv"}), "q")
    wide = {n: FUSED[n].double() for n in ("a_re", "a_im", "x0_re", "x0_im")}
    cases["gates wider than q"] = (lambda: call(**FUSED | wide), "a_re")
    cases["no steps"] = (lambda: call(**{n: x[:, :0] if x.dim() == 3 else x for n, x in FUSED.items()}), "q")
    return cases


def of_fused_backward():
    states = {"h_re": ones(*SEQUENCES), "h_im": ones(*SEQUENCES)}
    incoming = {name: ones(*SEQUENCES) for name in ("dy", "dh_re", "dh_im")}
    incoming |= {name: ones(*STATE) for name in ("dlast_re", "dlast_im")}
    call = lambda **given: fused_back(*given.values())  # noqa: E731
    bad = wrong_fused() | {name: wrong(SEQUENCES, OTHER_SHAPES) for name in ("dy", "dh_re", "dh_im", "h_re", "h_im")}
    bad |= {name: wrong(STATE, OTHER_STATES) for name in ("dlast_re", "dlast_im")}
    for name in ("h_re", "h_im"):
        bad[name]["number of steps, the last alone"] = ones(4, 1, 70)
    cases = each_wrong(call, incoming | FUSED | states, bad)
    real = incoming | FUSED | states | {"a_im": None, "x0_im": None, "h_im": ones(0)}
    for name in ("dh_im", "dlast_im"):
        alone = real | {"dh_im": None, "dlast_im": None, name: incoming[name]}
        cases[f"{name} of what is real"] = (lambda alone=alone: call(**alone), name)
    return cases


def of_chunk():
    heads, state = (2, 5, 3, 4), (2, 3, 4, 6)
    x = {"q": ones(*heads), "k": ones(*heads), "v": ones(2, 5, 3, 6), "a": ones(2, 5, 3, 1), "state": ones(*state)}
    sequences = {"batch": (1, 5, 3, 4), "length": (2, 4, 3, 4), "heads": (2, 5, 1, 4), "dimensions": (2, 5, 12)}
    bad = {
        "k": wrong(heads, sequences | {"channels": (2, 5, 3, 6)}),
        "v": wrong((2, 5, 3, 6), sequences),
        "a": wrong((2, 5, 3, 1), sequences | {"width": (2, 5, 3, 6)}),
        "state": wrong(state, {"batch": (1, 3, 4, 6), "orientation": (2, 3, 6, 4), "dimensions": (2, 12, 6)}),
    }
    del bad["a"]["type"]  # then it is the state's that does not fit
    cases = each_wrong(lambda **given: chunk(*given.values()), x, bad)
    incoming = {"dy": ones(2, 5, 3, 6), "dlast": ones(*state)}
    bad |= {"dy": wrong((2, 5, 3, 6), sequences), "dlast": bad["state"]}
    backward = each_wrong(lambda **given: chunk_back(*given.values()), incoming | x, bad)
    cases |= {f"backward, {case}": it for case, it in backward.items()}
    cases["everything integers"] = (lambda: chunk(*(t.long() for t in x.values())), "q")
    cases["gates of half precision"] = (lambda: chunk(**x | {"a": x["a"].half()}), "a")
    cases["complex inputs beside real gates"] = (lambda: chunk(*(x[n] + 0j for n in "qkv"), x["a"], x["state"]), "q")
    wide = ones(2, 5, 3, 200)
    cases["heads too wide"] = (lambda: chunk(wide, wide, wide, x["a"], ones(2, 3, 200, 200)), "d_qk")
    return cases


def of_heads():
    heads, state, kept = (2, 5, 3, 4), (2, 3, 4, 6), (2, 3, 1, 4, 6)
    x = {"q": ones(*heads), "k": ones(*heads), "v": ones(2, 5, 3, 6), "a": ones(2, 5, 3, 1), "state": ones(*state)}
    sequences = {"batch": (1, 5, 3, 4), "length": (2, 4, 3, 4), "heads": (2, 5, 1, 4), "dimensions": (2, 5, 12)}
    bad = {
        "k": wrong(heads, sequences | {"channels": (2, 5, 3, 6)}),
        "v": wrong((2, 5, 3, 6), sequences),
        "a": wrong((2, 5, 3, 1), sequences | {"width": (2, 5, 3, 6)}),
        "state": wrong(state, {"batch": (1, 3, 4, 6), "orientation": (2, 3, 6, 4), "dimensions": (2, 12, 6)}),
    }
    operator, backward = torch.ops.recurra.gate_loop_heads, torch.ops.recurra.gate_loop_heads_backward
    cases = each_wrong(lambda **given: operator(*given.values(), True), x, bad)
    bad["dy"], bad["dlast"] = wrong((2, 5, 3, 6), sequences), bad.pop("state")
    bad["kept"] = wrong(kept, {"chunks": (2, 3, 2, 4, 6), "orientation": (2, 3, 1, 6, 4), "dimensions": (2, 3, 24)})
    incoming = {"dy": ones(2, 5, 3, 6), "dlast": ones(*state)} | {n: x[n] for n in "qkva"} | {"kept": ones(*kept)}
    cases |= {f"backward, {n}": it for n, it in each_wrong(lambda **g: backward(*g.values()), incoming, bad).items()}
    for dtype in (torch.int64, torch.bfloat16):
        cases[f"everything {dtype}"] = (lambda dtype=dtype: operator(*(t.to(dtype) for t in x.values())), "q")
    cases["a complex gate beside real inputs"] = (lambda: operator(**x | {"a": x["a"] + 0j}), "a")
    return cases


def of_the_front_doors():
    step, wide = (64, 7, 8, 1), (64, 7, 8, 4)
    one = {name: ones(*step) for name in "qkv"}

    def real_part(**changes):
        x = one | {"re": ones(*step), "im": ones(*step), "state": ones(64, 8, 1, 1) + 0j} | changes
        x = {n: None if t is None else t.requires_grad_() for n, t in x.items()}
        y, last = gate_loop_real_part(*(x[n] for n in "qkv"), Planes(x["re"], x["im"]), state=x["state"])
        (y.sum() + last.abs().sum()).backward()

    bad = {name: wrong(step, {"batch": (1, 7, 8, 1), "length": (64, 6, 8, 1), "heads": (64, 7, 1, 1)}) for name in "kv"}
    bad |= {name: dict(bad["k"]) for name in ("re", "im")}
    for tensors in bad.values():
        del tensors["type"]  # it is promoted
    bad["state"] = {
        "batch": ones(1, 8, 1, 1) + 0j, "number of heads": ones(64, 1, 1, 1) + 0j, "type": ones(64, 8, 1, 1).double(),
        "number of dimensions": ones(64, 8) + 0j, "device": ones(64, 8, 1, 1, device="meta"),
    }  # fmt: skip
    cases = {}
    for name, tensors in bad.items():
        for kind, tensor in tensors.items():
            call = lambda name=name, tensor=tensor: real_part(**{name: tensor})  # noqa: E731
            prefix = "" if len(name) == 1 or name == "state" else "a_" if kind == "device" else "a."
            cases[f"real part, {name} of another {kind}"] = (call, prefix + name)
    cases["real part, a state that is complex beside real gates"] = (
        lambda: real_part(im=None),
        "state",
    )
    cases["real part, wide heads"] = (
        lambda: gate_loop_real_part(
            *[ones(*wide)] * 3, Planes(ones(*wide), ones(1, 7, 8, 4)), state=ones(64, 8, 4, 4) + 0j
        ),
        "a.im",
    )
    for mode in ("recurrent", "scan", "chunk", "attention", "fused"):
        cases[f"gate_loop, {mode}, state of another batch"] = (
            lambda mode=mode: gate_loop(*one.values(), ones(*step), state=ones(1, 8, 1, 1), mode=mode),
            "state",
        )
        cases[f"gate_loop, {mode}, state of another device"] = (
            lambda mode=mode: gate_loop(*one.values(), ones(*step), state=ones(64, 8, 1, 1, device="meta"), mode=mode),
            "state",
        )
    cases["softmax_attention, k of another device"] = (
        lambda: softmax_attention(one["q"], one["k"].to("meta"), one["v"], one["v"]),
        "k",
    )
    cases["linear_scan, h0 of another batch"] = (
        lambda: recurra.linear_scan(ones(*SEQUENCES), ones(*SEQUENCES), ones(1, 70)),
        "h0",
    )
    return cases


def of_out():
    memory = torch.zeros(4 * 6 * 70 + 1000)

    def at(start, *shape):
        return memory[start : start + torch.Size(shape).numel()].view(shape)

    x, apart = at(0, *SEQUENCES), {"a": ones(*SEQUENCES), "b": ones(*SEQUENCES), "h0": ones(*STATE)}
    call = lambda **given: recurra.linear_scan(*given.values(), out=x)  # noqa: E731
    shifted = {"shifted by a step": at(70, *SEQUENCES), "shifted by a number": at(1, *SEQUENCES)}
    shifted["in another order"] = at(0, 4, 70, 6).mT
    shifted["for all sequences"] = at(70, 6, 70)
    cases = {}
    for name, bad in {"a": shifted | {"for all steps": at(140, 70)}, "b": dict(list(shifted.items())[:3])}.items():
        for kind, tensor in bad.items():
            cases[f"out is {name} {kind}"] = (lambda n=name, t=tensor: call(**apart | {n: t}), "out")
    return cases


def of_products():
    x = {"x": ones(2, 5), "weight": ones(3, 5), "scale": ones(3), "bias": ones(3)}
    bad = {
        "x": wrong((2, 5), {"width": (2, 4), "number of dimensions": ()}),
        "weight": {"type": ones(3, 5).double(), "shape": ones(15), "layout": ones(5, 3).t()},
        "scale": wrong((3,), {"length": (2,), "shape": (3, 1)}) | {"layout": ones(6)[::2]},
        "bias": wrong((3,), {"length": (4,), "shape": (1, 3)}) | {"layout": ones(6)[::2]},
    }
    for kind, shape, dtype in (
        ("of int8 in rows", (3, 5), torch.int8),
        ("in panels of 63", (1, 5, 63), torch.bfloat16),
        ("in groups of 1,279 bytes", (1, 1, 1279), torch.uint8),
    ):
        bad["weight"][kind] = ones(*shape, dtype=dtype)
    return each_wrong(lambda **given: _decoding_linear(*given.values()), x, bad)


def of_the_delta_rule():
    steps = (4, 6, 3)
    x = {"q": ones(*steps, 5), "k": ones(*steps, 5), "v": ones(*steps, 7), "a": ones(*steps, 1), "b": ones(*steps, 1)}
    x["state"] = ones(4, 3, 5, 7)
    others = {"batch": (1, 6, 3, 5), "length": (4, 5, 3, 5), "number of heads": (4, 6, 1, 5), "size": (4, 6, 3, 4)}
    bad = {"k": wrong((*steps, 5), others)}
    for name, size in (("v", 7), ("a", 1), ("b", 1)):
        bad[name] = wrong(
            (*steps, size), {"batch": (1, 6, 3, size), "length": (4, 5, 3, size), "number of dimensions": steps}
        )
    bad["state"] = wrong((4, 3, 5, 7), {"batch": (1, 3, 5, 7), "size": (4, 3, 5, 6), "layout": (4, 3, 7, 5)})
    bad["q"] = {"type": ones(*steps, 5).double(), "number of dimensions": ones(4, 6, 15)}
    return each_wrong(lambda **given: torch.ops.recurra.delta_rule_fused(*given.values()), x, bad)


def of_sequences():
    x = {"projected": ones(4, 6, 15), "h": ones(4, 5), "gates": ones(10, 5), "candidate": ones(5, 5)}

    def call(projected, h, gates, candidate):
        weights = RecurrentWeights(gates.requires_grad_(gates.is_floating_point()), candidate)
        y, last = gru_sequence(GRUCell(2, 5), projected, h, weights)
        (y.sum() + last.sum()).backward()

    bad = {
        "projected": {"width": ones(4, 6, 14), "number of dimensions": ones(24, 15)},
        "h": wrong((4, 5), {"batch": (1, 5), "size": (4, 1)}),
        "gates": wrong((10, 5), {"height": (5, 5), "width": (10, 1)}),
        "candidate": wrong((5, 5), {"size": (1, 5)}),
    }
    del bad["h"]["type"]  # it may be wider
    named = {"gates": "weights.gates", "candidate": "weights.candidate"}
    cases = each_wrong(call, x, bad)
    return {case: (it, named.get(name, name)) for case, (it, name) in cases.items()}


def of_slstm():
    x = {"projected": ones(4, 6, 4, 2, 5), "weights": ones(2, 5, 20)}
    x |= {name: ones(4, 2, 5) for name in SLSTMParts._fields}

    def call(projected, weights, **state):
        y, last = slstm_sequence(projected, weights.requires_grad_(weights.is_floating_point()), SLSTMParts(**state))
        (y.sum() + last.c.sum()).backward()

    bad = {
        "projected": {"gates": ones(4, 6, 3, 2, 5), "number of dimensions": ones(4, 6, 40)},
        "weights": wrong((2, 5, 20), {"heads": (1, 5, 20), "height": (2, 1, 20), "width": (2, 5, 5)}),
        **{name: wrong((4, 2, 5), {"batch": (1, 2, 5), "heads": (4, 1, 5), "size": (4, 2, 1)}) for name in "cnmh"},
    }
    cases = each_wrong(call, x, bad)
    return {case: (it, f"state.{name}" if name in SLSTMParts._fields else name) for case, (it, name) in cases.items()}


def of_features():
    x = {"q": ones(4, 6, 2, 5), "k": ones(4, 6, 2, 5), "less": ones(4, 6, 2), "start": ones(4, 2, 5)}
    bad = {
        "k": wrong((4, 6, 2, 5), {"batch": (1, 6, 2, 5), "length": (4, 1, 2, 5), "size": (4, 6, 2, 1)}),
        "less": wrong((4, 6, 2), {"length": (4, 5, 2), "heads": (4, 6, 1), "number of dimensions": (4, 6, 2, 1)}),
        "start": wrong((4, 2, 5), {"batch": (1, 2, 5), "heads": (4, 1, 5), "size": (4, 2, 1)}),
    }
    return each_wrong(positive_features, x, bad)


def of_turned():
    x = {"b": ones(4, 6, 2, 8), "c": ones(4, 6, 2, 8), "angles": ones(4, 6, 2, 3), "scale": ones(4, 6, 2, 1)}
    bad = {
        "c": wrong((4, 6, 2, 8), {"batch": (1, 6, 2, 8), "length": (4, 5, 2, 8), "size": (4, 6, 2, 1)}),
        "angles": wrong((4, 6, 2, 3), {"heads": (4, 6, 1, 3), "length": (4, 5, 2, 3), "size": (4, 6, 2, 5)}),
        "scale": wrong((4, 6, 2, 1), {"heads": (4, 6, 1, 1), "size": (4, 6, 2, 8), "number of dimensions": (4, 6, 2)}),
    }
    return each_wrong(turned, x, bad)


def of_shifted_products():
    x = {"x": ones(4, 6, 5), "state": ones(4, 3, 5), "weight": ones(4, 5), "bias": ones(5)}
    bad = {
        "x": {"number of dimensions": ones(24, 5)},
        "state": wrong((4, 3, 5), {"batch": (1, 3, 5), "length": (4, 2, 5), "channels": (4, 3, 1)}),
        "weight": wrong((4, 5), {"channels": (4, 1), "number of dimensions": (4, 5, 1)}),
        "bias": wrong((5,), {"channels": (1,), "number of dimensions": (1, 5)}),
    }
    return each_wrong(shifted_products, x, bad)


def of_saved_tensors():
    """What a hook has made of a saved tensor, by its place among them: of half the bytes, or with one number alone."""
    slstm = [ones(4, 6, 4, 2, 5), ones(2, 5, 20), *(ones(4, 2, 5) for _ in SLSTMParts._fields)]
    rotated = [ones(4, 6, 2, 8), ones(4, 6, 2, 8), ones(4, 6, 2, 3), ones(4, 6, 2, 1)]
    calls = {
        "shifted products": (shifted_products, [ones(4, 6, 5), ones(4, 3, 5), ones(4, 5), ones(5)], range(4), range(4)),
        "sLSTM": (lambda p, w, *state: slstm_sequence(p, w, SLSTMParts(*state))[0], slstm, range(8), range(8)),
        "turned": (lambda *x: sum(part.sum() for part in turned(*x)), rotated, range(5), range(5)),
        "cross-entropy": (cross_entropy, [ones(6, 9), torch.arange(6)], (2, 3), (2, 3)),
        "GRU": (
            lambda p, h, *w: gru_sequence(GRUCell(2, 5), p, h, RecurrentWeights(*w))[0],
            [ones(4, 6, 15), ones(4, 5), ones(10, 5), ones(5, 5)],
            (4, 5, 7),
            (2, 3, 4, 7),
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
    "scan": of_scan, "scan, backward": of_scan_backward, "out": of_out, "fused": of_fused,
    "fused, backward": of_fused_backward, "chunk": of_chunk, "heads": of_heads, "front": of_the_front_doors,
    "products": of_products, "cells": of_sequences, "sLSTM": of_slstm, "positive features": of_features,
    "delta rule": of_the_delta_rule, "turned": of_turned, "shifted products": of_shifted_products,
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
