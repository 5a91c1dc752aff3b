"""Operators check shape, type, device and layout of every tensor before a kernel takes its address."""

import contextlib
import itertools
from pathlib import Path

import pytest
import torch
from tests.processes import Program, run_file

import recurra
from recurra.ops._operator import Operator
from recurra.ops.delta_rule.generalised import generalised_delta_rule
from recurra.ops.gate_loop import operator as gate_loop_operator
from recurra.ops.gate_loop.fused import Planes
from recurra.ops.gate_loop.operator import gate_loop_real_part
from recurra.ops.selective_scan.operator import selective_scan


def test_every_wrong_argument_is_refused_by_name(tmp_path):
    """In a process of their own, because without the checks most of these calls end it."""
    worker = Path(__file__).with_name("doors_worker.py")
    ended = Program(run_file(worker), tmp_path, OMP_NUM_THREADS="1").wait(300)
    found = dict(line.split("\t") for line in ended.stdout.splitlines() if "\t" in line)
    last = next(reversed(found), "none")
    assert ended.status == 0, f"status {ended.status}, the last case was {last!r}\n{ended.stderr[-3000:]}"
    assert len(found) > 90
    assert {case: said for case, said in found.items() if said != "refused"} == {}


CHANGES = {
    "fewer steps": lambda x: x[:, :1],
    "one more channel": lambda x: torch.cat([x, x[..., :1]], -1),
    "one channel": lambda x: x[..., :1],
    "no channels": lambda x: x[..., :0],
    "batch": lambda x: x[:1],
    "one dimension more": lambda x: x[None],
    "one dimension fewer": lambda x: x[0],
    "device": lambda x: x.to("meta"),
    **{str(kind): lambda x, kind=kind: x.to(kind) for kind in (torch.float64, torch.bfloat16, torch.cfloat, torch.int)},
}


def heads(d_v=5, d_a=1):
    draws = {"q": (2, 6, 3, 4), "k": (2, 6, 3, 4), "v": (2, 6, 3, d_v), "a": (2, 6, 3, d_a)}
    return {name: torch.ones(shape) for name, shape in draws.items()} | {"state": torch.ones(2, 3, 4, d_v)}


def channels(**changes):
    return {name: torch.ones(2, 6, 3, 1) for name in "qkva"} | {"state": torch.ones(2, 3, 1, 1)} | changes


def over_keys(*names):
    return {name: torch.ones(2, 6, 3, 4) for name in names}


def real_part(re, im=None, **given):
    return gate_loop_real_part(**given, a=Planes(re, im))


def planes():
    given = channels(state=torch.ones(2, 3, 1, 1, dtype=torch.cfloat))
    return {"re": given.pop("a"), "im": torch.ones(2, 6, 3, 1), **given}


MODES = torch.ones(2, 6, 4)
DOORS = {
    "linear_scan": (recurra.linear_scan, {"a": MODES, "b": MODES, "h0": torch.ones(2, 4)}),
    "gate_loop": (recurra.gate_loop, heads()),
    "gate_loop, groups": (recurra.gate_loop, heads() | {name: torch.ones(2, 6, 1, 4) for name in "qk"}),
    "gate_loop, transitions by channel": (recurra.gate_loop, heads(d_a=4)),
    "gate_loop, one channel": (recurra.gate_loop, channels()),
    "gate_loop, complex": (recurra.gate_loop, channels(a=torch.ones(2, 6, 3, 1, dtype=torch.cfloat))),
    "gate_loop_real_part": (real_part, planes()),
    "delta_rule": (recurra.delta_rule, heads() | {"b": torch.ones(2, 6, 3, 1)}),
    "generalised_delta_rule": (generalised_delta_rule, heads() | over_keys("a", "read", "write")),
    "selective_scan": (
        selective_scan,
        {"x": MODES, "step": MODES, "a": torch.ones(4, 5), "b": torch.ones(2, 6, 5), "c": torch.ones(2, 6, 5)}
        | {"h0": torch.ones(2, 5, 4)},
    ),
}  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("door", DOORS)
def test_a_door_lets_nothing_through_that_the_operator_would_refuse(monkeypatch, door, records):
    """Behind it nothing is checked again; this runs each operator's own check there, and no kernel."""
    function, good = DOORS[door]
    came, refused = [], []

    def checked(operator, *arguments):
        came.append(operator.name)
        try:
            operator._check(*arguments)
        except Exception as error:
            refused.append(str(error))
            raise
        results = operator._allocate(*arguments)
        return results.zero_() if isinstance(results, torch.Tensor) else tuple(x.zero_() for x in results)

    monkeypatch.setattr(Operator, "behind_door", checked)
    monkeypatch.setattr(gate_loop_operator, "needs_gradient", lambda *_: True)  # past the shorter way of one channel
    function(**good)
    assert came, "the call must reach an operator"
    for changes in itertools.combinations_with_replacement([None, *itertools.product(good, CHANGES)], 2):
        given = dict(good)
        for name, change in filter(None, changes):
            with contextlib.suppress(IndexError):  # nothing left to change
                given[name] = CHANGES[change](given[name])
        if records:
            given = {n: x.clone().requires_grad_(x.dtype.is_floating_point or x.is_complex()) for n, x in given.items()}
        with contextlib.suppress(TypeError, ValueError, RuntimeError, IndexError):
            function(**given)
        assert not refused, (changes, refused)
