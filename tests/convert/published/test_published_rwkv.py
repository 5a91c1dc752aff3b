"""What is particular to RWKV-4: the peer in float64, its five states, its rescaling, and the way back."""

import pytest
import torch

from recurra.convert.portable import PortableModel
from recurra.convert.published.folder import from_huggingface, to_huggingface
from recurra.models.language_model import LanguageModel, LanguageModelConfig

TOKENS = torch.randint(50, (2, 19), generator=torch.Generator().manual_seed(1))
SHAPE = {"vocab_size": 50, "n_layer": 2, "d_model": 8, "d_channel_mixing": 0, "biases": False}


@torch.no_grad()
def test_logits_and_states_are_the_peers_in_float64(peers, monkeypatch):
    peer, folder = peers("rwkv")
    model = from_huggingface(folder, dtype=torch.float64).model
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # the peer computes its keys in float32
    double = type(peer)(peer.config).double().eval()
    double.load_state_dict(peer.state_dict())
    expected = double(TOKENS, use_cache=True)
    pieces, state = [], None
    for piece in TOKENS.split([1, 7, 11], 1):
        logits, state = model(piece, state)
        pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), expected.logits, rtol=1e-10, atol=1e-10)
    theirs = [part.unbind(-1) for part in expected.state]  # all but the first two in float32
    for number in range(2):
        time, channels = state.layers[2 * number : 2 * number + 2]
        found = [channels.x, time.x, time.a, time.b, time.m]
        for one, other, tolerance in zip(found, theirs, [1e-10] * 2 + [1e-6] * 3, strict=True):
            torch.testing.assert_close(one, other[number], rtol=tolerance, atol=tolerance, check_dtype=False)
    later = double(TOKENS[:, :3], state=expected.state, use_cache=True).logits
    torch.testing.assert_close(model(TOKENS[:, :3], state)[0], later, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mixer": ["rwkv4", "rwkv4"], "embedding_norm": True},
            r"mixer \['rwkv4', 'rwkv4'\] instead of \['rwkv4', 'rw",
        ),
        ({"mixer": ["rwkv4", "rwkv4-channel-mixing"]}, "embedding_norm False instead of True"),
        ({"mixer": "rwkv4", "embedding_norm": True, "n_layer": 1}, "n_layer 1 instead of 2"),
    ],
    ids=["order", "norm", "half a block"],
)
def test_other_shapes_are_not_written(options, message, tmp_path):
    model = LanguageModel(LanguageModelConfig(**(SHAPE | options)))
    with pytest.raises(ValueError, match=f"{message}.*; expected the shape of a RwkvForCausalLM"):
        to_huggingface(PortableModel(model, None), tmp_path / "no")
