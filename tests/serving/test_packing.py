"""States as bytes."""

import pytest
import torch

from recurra.serving.store import pack, unpack
from recurra.state import tensors

from .conftest import language_model


@pytest.mark.parametrize("mixer", ["gateloop", "rotary-attention", "gru"])
@torch.no_grad()
def test_a_state_comes_back_bit_for_bit(mixer):
    model = language_model(mixer=mixer)
    _, state = model(torch.tensor([[1, 2, 3]]))
    back = unpack(pack(state), model)
    assert all(torch.equal(*pair) for pair in zip(tensors(state), tensors(back), strict=True))
    assert torch.equal(*(model(torch.tensor([[4]]), one)[0] for one in (state, back)))


@pytest.mark.parametrize("damage", [lambda b: b[:-3], lambda b: b"", lambda b: b"x" * len(b)])
def test_damaged_bytes_are_refused(damage):
    model = language_model()
    packed = pack(model.initial_state(1))
    with pytest.raises(ValueError, match="cannot be read"):
        unpack(damage(packed), model)


def test_the_state_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="cannot be read"):
        unpack(pack(language_model(mixer="gru").initial_state(1)), language_model())
