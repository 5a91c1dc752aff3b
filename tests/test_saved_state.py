"""States as tensors: what a file holds, and what it refuses."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from recurra import state as states
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformer, CompactRecurrentTransformerConfig
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import Ragged, state_from_tensors, state_to_tensors


class Inner(NamedTuple):
    real: Tensor
    n_steps: int


class Outer(NamedTuple):
    layers: tuple[Inner | None, ...]
    mean: Tensor


class Model(nn.Module):
    """Its state has everything that a state may hold; it leaves the tensors to what reads them."""

    def initial_state(self, batch: int) -> Outer:
        return Outer((Inner(torch.zeros(batch, 2, dtype=torch.complex64), 1), None), torch.ones(batch, 2))

    def require_state(self, state: Outer, batch: int) -> None:
        self.asked = (state, batch)


@pytest.fixture
def state() -> Outer:
    inner = Inner(torch.randn(3, 2, dtype=torch.complex64), 41)
    return Outer((inner, None), torch.randn(3, 2, requires_grad=True))


def test_a_state_comes_back_with_its_structure_and_values(state):
    model = Model()
    saved = state_to_tensors(state)
    restored = state_from_tensors(saved, model)
    assert list(saved) == ["layers.0.real", "layers.0.n_steps", "mean"]
    assert not any(tensor.is_complex() for tensor in saved.values())
    assert type(restored) is Outer
    assert type(restored.layers) is tuple
    assert type(restored.layers[0]) is Inner
    assert restored.layers[1] is None
    assert restored.layers[0].n_steps == 41
    assert torch.equal(restored.layers[0].real, state.layers[0].real)
    assert torch.equal(restored.mean, state.mean)
    assert not restored.mean.requires_grad
    assert model.asked[0] is restored
    assert model.asked[1] == 3


def test_no_state_stays_no_state():
    assert state_from_tensors(state_to_tensors(None), Model()) is None


def kept(saved: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {place: tensor for place, tensor in saved.items() if tensor is not None}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"mean": None}, r"^state\.mean is None in the saved state; expected float32 \(1, 2\) on cpu, as in the model"),
        ({"layers.1": torch.ones(2, 2)}, r"^state\.layers\.1 is float32 .*; expected None"),
        ({"layers.2": torch.ones(2, 2)}, r"^state\.layers\.2 is float32 .*; expected None"),
        ({"layers.0.n_steps": torch.tensor(4.5)}, r"^state\.layers\.0\.n_steps is float32 .*; expected an int"),
        ({"layers.0.n_steps": torch.ones(2, dtype=torch.int64)}, r"n_steps is int64 \(2,\) .*; expected an int"),
    ],
)
def test_another_structure_is_refused_with_its_place(state, damage, message):
    with pytest.raises(ValueError, match=message):
        state_from_tensors(kept(state_to_tensors(state) | damage), Model())


def models() -> dict[str, nn.Module]:
    shape = {"n_layer": 2, "d_model": 8, "d_channel_mixing": 8}
    crt = CompactRecurrentTransformerConfig(vocab_size=5, segment_length=4, n_heads=2, **shape)
    return {
        "gateloop": LanguageModel(LanguageModelConfig(vocab_size=5, **shape)),
        "rotary": LanguageModel(LanguageModelConfig(vocab_size=5, mixer="rotary-attention", **shape)),
        "crt": CompactRecurrentTransformer(crt),
    }


@pytest.fixture(params=models())
def model(request) -> nn.Module:
    return models()[request.param].eval()


def test_a_models_state_comes_back(model):
    _, state = model(torch.randint(5, (3, 6)))
    restored = state_from_tensors(state_to_tensors(state), model)
    assert type(restored) is type(state)
    tokens = torch.randint(5, (3, 5))
    assert torch.equal(model(tokens, restored)[0], model(tokens, state)[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.to(torch.complex128 if tensor.is_complex() else torch.float64),
        lambda tensor: tensor[..., :1],
        lambda tensor: torch.cat([tensor, tensor], 1),
    ],
    ids=["type", "size", "twice-as-much"],
)
def test_a_changed_tensor_is_refused(model, change):
    """Each tensor of the saved state in turn; those of another size must not fit by chance."""
    _, state = model(torch.randint(5, (3, 6)))
    for number, tensor in enumerate(states.tensors(state)):
        if change(tensor).shape == tensor.shape and change(tensor).dtype == tensor.dtype:
            continue
        counter = iter(range(100))
        damaged = states.map_tensors(lambda x: change(x) if next(counter) == number else x, state)  # noqa: B023
        with pytest.raises(ValueError, match=r"state\.\w+ is .*; expected "):
            state_from_tensors(state_to_tensors(damaged), model)


def test_tensors_of_different_batches_are_refused(model):
    _, state = model(torch.randint(5, (3, 6)))
    last = len(list(states.tensors(state))) - 1
    counter = iter(range(100))
    damaged = states.map_tensors(lambda x: x[:2] if next(counter) == last else x, state)
    with pytest.raises(ValueError, match=r"state\.\w+ is .*; expected .*\(3, "):
        state_from_tensors(state_to_tensors(damaged), model)


def test_a_place_that_no_segment_has_is_refused():
    model = models()["crt"]
    _, state = model(torch.randint(5, (3, 6)))
    for position in (-1, 4):
        with pytest.raises(ValueError, match=f"state.position is {position}; expected a number from 0 to 3"):
            state_from_tensors(state_to_tensors(state._replace(position=position)), model)


def test_fewer_layers_than_the_model_has_are_refused(model):
    _, state = model(torch.randint(5, (3, 6)))
    shorter = {place: tensor for place, tensor in state_to_tensors(state).items() if ".1." not in place}
    with pytest.raises(ValueError, match=r"^state\.\w+\.1\.\w+ is None in the saved state; expected (float|complex)"):
        state_from_tensors(shorter, model)


def test_a_batch_at_different_positions_is_not_written():
    with pytest.raises(ValueError, match="state is one of different positions; expected one of a single sequence: see"):
        state_to_tensors([Ragged((torch.zeros(1, 2), torch.zeros(1, 3)))])


@pytest.mark.parametrize("pairs", [torch.ones(3, 2, 2, dtype=torch.bfloat16), torch.ones(3, 2, 2, dtype=torch.float64)])
def test_pairs_of_another_type_are_left_to_what_refuses_them(state, pairs):
    model = Model()
    restored = state_from_tensors(state_to_tensors(state) | {"layers.0.real": pairs}, model)
    assert restored.layers[0].real.dtype == pairs.dtype


def test_pairs_may_lie_anyhow(state):
    saved = state_to_tensors(state)
    turned = saved["layers.0.real"].mT.contiguous().mT
    assert torch.equal(
        state_from_tensors(saved | {"layers.0.real": turned}, Model()).layers[0].real, state.layers[0].real
    )
