"""States that reach a compiled step: those that fit, however they lie in memory, and no others.

A compiled step reads addresses, so a state that is let in wrongly can end the process. The cases therefore run in a
process of their own, which prints what became of each: "step" if the step gave the model's numbers without the model,
"model" if the model was asked instead, and the error of anything else.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests.processes import SOURCE, Program
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from recurra import state as states
from recurra.decoding.steps import CompiledStep
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import map_tensors, tensors

pytestmark = pytest.mark.compile  # the other process runs without the shape checks, as recording asks for


class Other(NamedTuple):
    layers: tuple


def expanded(tensor: Tensor) -> Tensor:
    """Equal numbers along dimension 1, which has a stride of 0."""
    return tensor[:, :1].expand(tensor.shape)


def transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def with_gaps(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, 1)[:, ::2]


def with_offset(tensor: Tensor) -> Tensor:
    whole = torch.zeros(3 + tensor.numel(), dtype=tensor.dtype)
    whole[3:] = tensor.flatten()
    return whole[3:].view(tensor.shape)


def of_layers(change: Callable) -> Callable:
    return lambda state: type(state)(change(state.layers))


def of_tensors(change: Callable) -> Callable:
    return lambda state: map_tensors(change, state)


def faked(tensor: Tensor) -> Tensor:
    return FakeTensorMode().from_tensor(tensor)


FITTING: dict[str, Callable] = {
    "as it is": of_tensors(lambda x: x),
    "strides of another order": of_tensors(transposed),
    "strides with gaps": of_tensors(with_gaps),
    "a stride of 0": of_tensors(expanded),
    "an offset": of_tensors(with_offset),
    "conjugated when read": of_tensors(lambda x: x.conj() if x.is_complex() else x),
    "negated when read": of_tensors(torch._neg_view),
}
REFUSED: dict[str, Callable] = {
    "another batch": lambda state: states.concatenate([state, state]),
    "an empty batch": lambda state: states.select(state, slice(0)),
    "half a batch": lambda state: states.select(state, slice((states.n_streams(state) or 0) // 2)),
    "fewer numbers": of_tensors(lambda x: x[:, :-1]),
    "more numbers": of_tensors(lambda x: torch.cat([x, x], 1)),
    "a dimension less": of_tensors(lambda x: x[..., 0]),
    "a dimension more": of_tensors(lambda x: x[..., None]),
    "another type": of_tensors(lambda x: x.to(torch.complex128 if x.is_complex() else torch.float64)),
    "a narrower type": of_tensors(lambda x: x.real.to(torch.float16)),
    "another device": of_tensors(lambda x: x.to("meta")),
    "another layout": of_tensors(lambda x: x.to_sparse()),
    "fake tensors": of_tensors(faked),
    "zeros without memory": of_tensors(lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype)),
    "a layer too few": of_layers(lambda layers: layers[:-1]),
    "a layer too many": of_layers(lambda layers: (*layers, layers[0])),
    "a list of layers": of_layers(list),
    "no tensor in a layer": of_layers(lambda layers: (type(layers[0])(None), *layers[1:])),
    "a number in a layer": of_layers(lambda layers: (type(layers[0])(0.0), *layers[1:])),
    "a plain tuple": tuple,
    "another model's": lambda state: Other(state.layers),
    "a tensor": lambda state: next(tensors(state)),
}
BATCHES = {"one row": 1, "two rows": 2, "eleven rows, filled up to twelve": 11}


class AskedTheModel(Exception):
    """The step handed its input to the model."""


def outcome(step: CompiledStep, change: Callable, rows: int) -> str:
    """Tell what becomes of a changed state."""
    tokens = torch.randint(31, (rows, 1))
    _, state = step.model(torch.randint(31, (rows, 3)))  # after one token alone it would be real
    step(tokens, state)  # recorded now, if it is the first of its size
    changed = change(state)

    def ask(*_):
        raise AskedTheModel

    hook = step.model.register_forward_pre_hook(ask)
    try:
        logits, after = step(tokens, changed)
    except AskedTheModel:
        return "model"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        hook.remove()
    right = step.model(tokens, changed)
    pairs = zip((logits, *tensors(after)), (right[0], *tensors(right[1])), strict=True)
    return "step" if all(torch.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in pairs) else "other numbers"


def print_outcomes() -> None:
    """Try everything; what the other process runs."""
    torch.manual_seed(0)
    with torch.no_grad():
        model = LanguageModel(LanguageModelConfig(31, None, 2, 24, 41)).eval()
        step = CompiledStep(model, 31)
        for rows_name, rows in BATCHES.items():
            for name, change in (FITTING | REFUSED).items():
                print(json.dumps([rows_name, name, outcome(step, change, rows)]), flush=True)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[tuple[str, str], str]:
    path = os.pathsep.join(map(str, (SOURCE, SOURCE.parent)))  # recurra, and what this file imports from tests
    code = f"import runpy; runpy.run_path({str(Path(__file__))!r})['print_outcomes']()"
    chosen = {"RECURRA_SHAPE_CHECKS": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = Program(code, tmp_path_factory.mktemp("outcomes"), **chosen).wait()
    found = {tuple(names): what for *names, what in map(json.loads, done.stdout.splitlines())}
    assert done.status == 0, f"after {list(found)[-1:]}: {done.said}"
    return found


def test_states_that_fit_are_taken_and_all_others_left_to_the_model(outcomes):
    expected = {}
    for rows_name, rows in BATCHES.items():
        expected |= dict.fromkeys([(rows_name, name) for name in FITTING], "step")
        expected |= dict.fromkeys([(rows_name, name) for name in REFUSED], "model")
        # by torch's operations, those that fill up the rows
        expected[rows_name, "zeros without memory"] = "step" if rows == 11 else "model"
    assert outcomes == expected
