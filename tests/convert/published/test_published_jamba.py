"""What is particular to Jamba: the peer in float64, mixtures of experts, where attention stands, and the way back."""

import json
import shutil

import pytest
import torch

from recurra.convert.portable import PortableModel
from recurra.convert.published.folder import from_huggingface, to_huggingface
from recurra.models.language_model import LanguageModel, LanguageModelConfig

TOKENS = torch.randint(50, (2, 21), generator=torch.Generator().manual_seed(1))
MAMBA = {"selection_norm": 1e-5, "selection_scales": True}
ATTENTION = {"n_heads": 2, "rotated_share": 0.0, "window": None}
SHAPE = {"vocab_size": 50, "d_model": 8, "feed_forward": "swiglu", "norm": "rms", "biases": False}


def portable(mixers, mamba=None, attention=None, **changes):
    options = {"mamba": MAMBA | (mamba or {}), "rotary-attention": ATTENTION | (attention or {})}
    options = {name: options[name] for name in dict.fromkeys(mixers)}
    config = LanguageModelConfig(**(SHAPE | changes), n_layer=len(mixers), mixer=mixers, mixer_options=options)
    return PortableModel(LanguageModel(config).eval(), None)


@torch.no_grad()
def test_logits_and_states_are_the_peers_in_float64(peers, monkeypatch):
    """21 steps, here in pieces, and then 3 more from both caches, one by one: a longer call of theirs starts anew."""
    peer, folder = peers("jamba")
    model = from_huggingface(folder, dtype=torch.float64).model
    found, state = [], None
    for piece in TOKENS.split([1, 7, 13, 0], 1) + TOKENS[:, :3].split(1, 1):
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 16}, "num_experts is 16 in 1 of 3 layers; expected 1: mixtures of experts are not supported"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias .* is True, which is not supported; expected False"),
        ({"attn_layer_offset": 0}, r"missing: model\.layers\.0\.self_attn\.q_proj\.weight"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(peers, tmp_path, change, message):
    folder = shutil.copytree(peers("jamba")[1], tmp_path / "copy")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        from_huggingface(folder)


@pytest.mark.parametrize(
    ("mixers", "period", "offset"),
    [
        (["mamba", "rotary-attention"], 2, 1),
        (["rotary-attention", "mamba", "mamba", "rotary-attention"], 3, 0),
        (["mamba"], 2, 1),
    ],
    ids=str,
)
def test_our_own_hybrid_of_published_shape_is_exported(mixers, period, offset, tmp_path):
    from transformers import AutoModelForCausalLM

    ours = portable(mixers)
    to_huggingface(ours, tmp_path / "theirs")
    entries = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (entries["attn_layer_period"], entries["attn_layer_offset"]) == (period, offset)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    with torch.inference_mode():
        expected = peer(TOKENS, use_cache=False).logits
    torch.testing.assert_close(ours.model(TOKENS)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("mixers", "changes", "message"),
    [
        (["rotary-attention", "rotary-attention", "mamba"], {}, "expected attention at equal distances"),
        (["mamba"], {"mamba": {"selection_scales": False}}, "selection_scales of mamba is False; expected True, as of"),
        (["mamba"], {"mamba": {"selection_norm": 1e-6}}, "selection_norm of mamba is 1e-06; expected 1e-05, as of a J"),
        (["mamba", "rotary-attention"], {"attention": {"window": 5}}, "window of rotary-attention is 5; expected None"),
        (["mamba", "rotary-attention"], {"attention": {"rotated_share": 1.0}}, "rotated_share .* is 1.0; expected 0.0"),
        (["mamba", "rotary-attention"], {"attention": {"d_head": 6}}, "d_head is 6; expected d_model / n_heads"),
    ],
    ids=str,
)
def test_other_shapes_are_not_written(mixers, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        to_huggingface(portable(mixers, **changes), tmp_path / "no")
