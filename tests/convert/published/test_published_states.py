"""Logits and states in pieces against peers in float64."""

from types import SimpleNamespace

import torch
from transformers.models.qwen3_next import modeling_qwen3_next

from recurra.convert.published.folder import from_huggingface

TOKENS = torch.randint(50, (2, 75), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_jamba(peers, monkeypatch):
    """75 steps, here in pieces, and then 3 more from both caches, one by one: a longer call of theirs starts anew."""
    peer, folder = peers("jamba")
    model = from_huggingface(folder, dtype=torch.float64).model
    found, state = [], None
    for piece in TOKENS.split([1, 7, 67], 1) + TOKENS[:, :3].split(1, 1):
        logits, state = model(piece, state)
        found.append(logits)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)
    double = type(peer)(peer.config).double().eval()
    double.load_state_dict(peer.state_dict())
    whole = double(TOKENS, use_cache=True)
    later = [
        double(step, past_key_values=whole.past_key_values, use_cache=True).logits for step in TOKENS[:, :3].split(1, 1)
    ]
    torch.testing.assert_close(torch.cat(found, 1), torch.cat([whole.logits, *later], 1), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_qwen3_next(peers, monkeypatch):
    """75 steps: more than a chunk of theirs, and then 3 more from its cache."""
    peer, folder = peers("qwen3-next")
    model = from_huggingface(folder, dtype=torch.float64).model
    names = {name: getattr(torch, name) for name in dir(torch)}
    monkeypatch.setattr(modeling_qwen3_next, "torch", SimpleNamespace(**(names | {"float32": torch.float64})))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    double = type(peer)(peer.config).double().eval()
    double.load_state_dict(peer.state_dict())
    rotary = double.model.rotary_emb
    n_rotated = 2 * len(rotary.inv_freq)
    rotary.inv_freq = 5e5 ** -(torch.arange(0, n_rotated, 2, dtype=torch.float64) / n_rotated)
    monkeypatch.setattr(torch, "float", torch.float64)
    expected = double(TOKENS, use_cache=True)
    pieces, state = [], None
    for piece in TOKENS.split([1, 7, 67], 1):
        logits, state = model(piece, state)
        pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), expected.logits, rtol=1e-10, atol=1e-10)
    later = double(TOKENS[:, :3], past_key_values=expected.past_key_values, use_cache=True).logits
    torch.testing.assert_close(model(TOKENS[:, :3], state)[0], later, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_rwkv(peers, monkeypatch):
    peer, folder = peers("rwkv")
    model = from_huggingface(folder, dtype=torch.float64).model
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # the peer computes its keys in float32
    double = type(peer)(peer.config).double().eval()
    double.load_state_dict(peer.state_dict())
    expected = double(TOKENS, use_cache=True)
    pieces, state = [], None
    for piece in TOKENS.split([1, 7, 67], 1):
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
