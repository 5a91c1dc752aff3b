"""The state of a compact recurrent vision Transformer: its start, and what is refused in its place."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from recurra import state as states
from recurra.video.crvit import CompactRecurrentViT, CompactRecurrentViTConfig, CompactRecurrentViTState
from recurra.video.timesformer import TimeSformerState

SIZES = {"n_classes": 5, "n_frames": 3, "image_size": 8, "patch_size": 4, "n_layer": 1, "d_model": 12, "n_heads": 3}
N_VECTORS = {"per_patch": 4, "pooled": 1}


def make(memory="per_patch", dtype=torch.float32, **options) -> CompactRecurrentViT:
    config = CompactRecurrentViTConfig(**{**SIZES, "d_channel_mixing": 20, "memory": memory, **options})
    return CompactRecurrentViT(config).to(dtype).eval()


def draw(batch=2, dtype=torch.float32) -> Tensor:
    return torch.randn(batch, 6, 3, 8, 8, dtype=dtype)


@pytest.mark.parametrize("memory", N_VECTORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_stream_starts_from_the_initial_state(memory, dtype):
    model, clip = make(memory, dtype), draw(dtype=dtype)
    start = model.initial_state(2)
    assert [tuple(tensor.shape) for tensor in start] == [(2, N_VECTORS[memory], 12), (2, 12), (2,)]
    assert not any(tensor.any() for tensor in start)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    with torch.no_grad():
        for found, told in zip(model(clip), model(clip, start)):
            assert states.layout(found) == states.layout(told)
            assert all(torch.equal(one, other) for one, other in zip(states.tensors(found), states.tensors(told)))
        _, last = model(clip)
    assert {tensor.dtype for tensor in (*start, *last)} == {expected}
    assert states.layout(start) == states.layout(last)


def test_the_initial_state_is_on_the_models_device():
    model = make().to("meta")
    assert {tensor.device.type for tensor in model.initial_state(2)} == {"meta"}


class Other(NamedTuple):
    """Another module's state, with the same tensors."""

    memory: Tensor
    class_token: Tensor
    started: Tensor


OF_TWO = "float32 (2, 4, 12) on cpu"
REFUSED = {
    "another batch": (
        lambda state: make()(draw(3))[1],
        ValueError,
        f"state.memory is float32 (3, 4, 12) on cpu; expected {OF_TWO}: pass the state that this model returned",
    ),
    "another kind of memory": (
        lambda state: make("pooled")(draw())[1],
        ValueError,
        f"state.memory is float32 (2, 1, 12) on cpu; expected {OF_TWO}",
    ),
    "another size": (
        lambda state: make(d_model=6)(draw())[1],
        ValueError,
        f"state.memory is float32 (2, 4, 6) on cpu; expected {OF_TWO}",
    ),
    "another dtype": (
        lambda state: make(dtype=torch.float64)(draw(dtype=torch.float64))[1],
        ValueError,
        f"state.memory is float64 (2, 4, 12) on cpu; expected {OF_TWO}",
    ),
    "half precision": (
        lambda state: states.map_tensors(Tensor.bfloat16, state),
        ValueError,
        f"state.memory is bfloat16 (2, 4, 12) on cpu; expected {OF_TWO}",
    ),
    "another device": (
        lambda state: states.to(state, "meta"),
        ValueError,
        f"state.memory is float32 (2, 4, 12) on meta; expected {OF_TWO}",
    ),
    "a class token of one sequence": (
        lambda state: state._replace(class_token=state.class_token[:1]),
        ValueError,
        "state.class_token is float32 (1, 12) on cpu; expected float32 (2, 12) on cpu",
    ),
    "booleans for started": (
        lambda state: state._replace(started=state.started > 0),
        ValueError,
        "state.started is bool (2,) on cpu; expected float32 (2,) on cpu",
    ),
    "a column for started": (
        lambda state: state._replace(started=state.started[:, None]),
        ValueError,
        "state.started is float32 (2, 1) on cpu; expected float32 (2,) on cpu",
    ),
    "no class token": (
        lambda state: state._replace(class_token=None),
        TypeError,
        "state.class_token is None; expected a torch.Tensor",
    ),
    "a tuple": (tuple, TypeError, "state is a tuple; expected a CompactRecurrentViTState, or None to start a stream"),
    "a tensor": (
        lambda state: state.memory,
        TypeError,
        f"state is {OF_TWO}; expected a CompactRecurrentViTState",
    ),
    "another module's": (
        lambda state: Other(*state),
        TypeError,
        "state is an Other; expected a CompactRecurrentViTState",
    ),
    "TimeSformer's": (
        lambda state: TimeSformerState(),
        TypeError,
        "state is a TimeSformerState; expected a CompactRecurrentViTState",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_this_models_state_is_refused(case):
    change, error, message = REFUSED[case]
    model, clip = make(), draw()
    with torch.no_grad():
        _, state = model(clip)
        wrong = change(state)
        for ask in (lambda: model(clip, wrong), lambda: model.require_state(wrong, 2)):
            with pytest.raises(error) as caught:
                ask()
            assert str(caught.value).startswith(message)
        assert isinstance(model(clip, state)[1], CompactRecurrentViTState)
