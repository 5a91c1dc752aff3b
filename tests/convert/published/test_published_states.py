"""Logits and states in pieces against peers in float64."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.bamba import modeling_bamba
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.granitemoehybrid import modeling_granitemoehybrid
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.lfm2_moe import modeling_lfm2_moe
from transformers.models.minimax import modeling_minimax
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.zamba2 import modeling_zamba2

from recurra.convert.published._rules import fused_of, join_fused, rules_of, usual_names, weights_by_their_names
from recurra.convert.published.folder import ARCHITECTURES, from_huggingface
from recurra.decoding.steps import prepare
from recurra.state import tensors

TOKENS = torch.randint(50, (2, 75), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["jamba", "jamba-experts"])
@torch.no_grad()
def test_jamba(peers, monkeypatch, name):
    """75 steps, here in pieces, and then 3 more from both caches, one by one: a longer call of theirs starts anew."""
    peer, folder = peers(name)
    model = from_huggingface(folder, dtype=torch.float64).model
    found, state = [], None
    for piece in TOKENS.split([1, 7, 67], 1) + TOKENS[:, :3].split(1, 1):
        logits, state = model(piece, state)
        found.append(logits)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for number in ("float", "float32"):
        monkeypatch.setattr(torch, number, torch.float64)
    double = type(peer)(peer.config).double().eval()
    double.load_state_dict(peer.state_dict())
    whole = double(TOKENS, use_cache=True)
    later = [
        double(step, past_key_values=whole.past_key_values, use_cache=True).logits for step in TOKENS[:, :3].split(1, 1)
    ]
    torch.testing.assert_close(torch.cat(found, 1), torch.cat([whole.logits, *later], 1), rtol=1e-10, atol=1e-10)


SOURCES = {
    "bamba": modeling_bamba,
    "falcon-h1": modeling_falcon_h1,
    "falcon-h1-norm": modeling_falcon_h1,
    "falcon-h1-norm-last": modeling_falcon_h1,
    "granite": modeling_granitemoehybrid,
    "granite-dense": modeling_granitemoehybrid,
    "granite-rope": modeling_granitemoehybrid,
    "kimi": modeling_kimi_linear,
    "kimi-groups": modeling_kimi_linear,
    "lfm2": modeling_lfm2,
    "lfm2-biases": modeling_lfm2,
    "lfm2-experts": modeling_lfm2_moe,
    "minimax": modeling_minimax,
    "minimax-factors": modeling_minimax,
    "olmo": modeling_olmo_hybrid,
    "olmo-without-positions": modeling_olmo_hybrid,
    "nemotron": modeling_nemotron_h,
    "nemotron-experts": modeling_nemotron_h,
    "nemotron-latent-experts": modeling_nemotron_h,
    "qwen3-next": modeling_qwen3_next,
    "qwen3-next-experts": modeling_qwen3_next,
    "qwen3-next-some-experts": modeling_qwen3_next,
    "qwen3.5": modeling_qwen3_5,
    "qwen3.5-experts": modeling_qwen3_5_moe,
    "zamba2": modeling_zamba2,
    "zamba2-adapters": modeling_zamba2,
}


@pytest.mark.parametrize("name", SOURCES)
@torch.no_grad()
def test_hybrids_with_attention(peers, monkeypatch, name):
    """75 steps: more than a chunk of theirs, and then 3 from its cache, one by one, as Bamba requires."""
    source = SOURCES[name]
    peer, folder = peers(name)
    model = from_huggingface(folder, dtype=torch.float64).model
    names = {name: getattr(torch, name) for name in dir(torch)} | dict.fromkeys(("float", "float32"), torch.float64)
    monkeypatch.setattr(source, "torch", SimpleNamespace(**names))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    double = type(peer)(peer.config).double().eval()
    double.load_state_dict(peer.state_dict())
    if (rotary := getattr(double.model, "rotary_emb", None) or getattr(double.model, "pos_emb", None)) is not None:
        n_rotated = 2 * len(rotary.inv_freq)
        shares = torch.arange(0, n_rotated, 2, dtype=torch.float64) / n_rotated
        rotary.inv_freq = peer.config.rope_parameters["rope_theta"] ** -shares
    for layer in (one for one in double.modules() if hasattr(one, "slope_rate")):
        layer.query_decay, layer.key_decay, layer.diagonal_decay = layer.decay_factors(layer.slope_rate)
    expected = double(TOKENS, use_cache=True)
    pieces, state = [], None
    for piece in TOKENS.split([1, 7, 67], 1):
        logits, state = model(piece, state)
        pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), expected.logits, rtol=1e-10, atol=1e-10)
    _, at_once = model(TOKENS)
    for found, whole in zip(tensors(state), tensors(at_once), strict=True):
        torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-10)
    for number, step in enumerate(TOKENS[:, :3].split(1, 1)):
        place = torch.full((2, 1), TOKENS.shape[1] + number)  # which a Bamba does not count itself
        later = double(step, past_key_values=expected.past_key_values, position_ids=place, use_cache=True).logits
        logits, state = model(step, state)
        torch.testing.assert_close(logits, later, rtol=1e-9, atol=1e-9)


PADDED = [
    "bamba",
    "granite",
    "granite-dense",
    "kimi",
    "lfm2",
    "lfm2-experts",
    "mamba2",
    "minimax",
    "olmo",
    "qwen3-next",
    "qwen3-next-experts",
    "qwen3.5",
    "qwen3.5-experts",
    "zamba2",
]
"""Of each kind one whose class of transformers masks padding in front."""


@pytest.mark.parametrize("name", PADDED)
@torch.no_grad()
def test_padding_in_front(peers, name):
    peer, folder = peers(name)
    model, mask = from_huggingface(folder).model, torch.ones(2, 19, dtype=torch.bool)
    mask[0, :7] = False
    expected = peer(TOKENS[:, :19], attention_mask=mask.long(), use_cache=False).logits[mask]
    found = model(TOKENS[:, :19], mask=mask)[0][mask]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


GRADIENTS = [
    "bamba",
    "falcon-h1-norm",
    "granite",
    "granite-dense",
    "jamba-experts",
    "lfm2-biases",
    "nemotron",
    "nemotron-experts",
]
GRADIENTS += ["kimi", "minimax-factors", "olmo", "qwen3-next-experts", "qwen3.5", "qwen3.5-experts", "zamba2-adapters"]


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(peers, name):
    """Of every weight: the rules are linear up to constants, so they turn gradients into the peer's as well."""
    peer, folder = peers(name)
    model = from_huggingface(folder).model
    weights = (TOKENS[:, :19, None] % 7 - 3.0) / 10 * torch.linspace(-1, 1, 50)
    (model(TOKENS[:, :19])[0] * weights).sum().backward()
    peer.zero_grad()
    (peer(TOKENS[:, :19], use_cache=False).logits * weights).sum().backward()
    expected = {name: weight.grad.clone() for name, weight in peer.named_parameters()}
    expected = revert_weight_conversion(peer, expected)  # as in files
    expected = usual_names(ARCHITECTURES[peer.config.model_type], expected)
    peer.zero_grad()
    found = gradients_by_their_names(model, peer.config.model_type)
    found = {name: x for name, x in found.items() if not name.endswith(("correction_bias", "slope_rate"))}  # constants
    if model.config.tie_embeddings:
        del found[ARCHITECTURES[peer.config.model_type].head]
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        close = 1e-5 * gradient.abs().max().item()
        torch.testing.assert_close(found[key], gradient, rtol=0, atol=close, msg=lambda text, key=key: f"{key}: {text}")


def gradients_by_their_names(model, model_type):
    """What the gradients, added to weights of zeros, change in them as transformers has them."""
    architecture = ARCHITECTURES[model_type]
    rules, fused = rules_of(architecture, model.config), fused_of(architecture, model.config)
    stepped, start = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        for one, zero, weight in zip(stepped.parameters(), start.parameters(), model.parameters(), strict=True):
            one.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
            zero.zero_()
    after, before = (join_fused(weights_by_their_names(one, rules), fused) for one in (stepped, start))
    return {name: after[name] - before[name] for name in after}


@pytest.mark.parametrize("name", ["kimi", "minimax", "nemotron-experts", "zamba2"])
@torch.no_grad()
def test_decoding_with_packed_layers(peers, name):
    model = from_huggingface(peers(name)[1]).model
    prepared, found, state = prepare(model, "float32"), [], None
    for step in TOKENS[:, :9].split(1, 1):
        logits, state = prepared(step, state)
        found.append(logits)
    expected = model(TOKENS[:, :9])[0]
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=0, atol=1e-5 * expected.abs().max().item())


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
