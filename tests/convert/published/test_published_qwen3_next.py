"""What is particular to Qwen3-Next: the peer in float64, mixtures of experts, fused matrices, and the way back."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_next import modeling_qwen3_next

from recurra.convert.portable import PortableModel
from recurra.convert.published.folder import from_huggingface, to_huggingface
from recurra.models.language_model import LanguageModel, LanguageModelConfig

TOKENS = torch.randint(50, (2, 75), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_logits_and_states_are_the_peers_in_float64(peers, monkeypatch):
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"mlp_only_layers": [1]},
            "num_experts .* in 1 of 2 layers; expected 0, or all layers in mlp_only_layers: mixtures of experts",
        ),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2, "num_experts": 8}, "num_experts is 8 in 1 of 2 layers"),
        ({"layer_types": ["mlp"]}, "layer_types in .*; expected a list of linear_attention, full_attention"),
        (
            {"layer_types": ["full_attention"]},
            "layer_types is .*; expected one of .*, full_attention for each of 2 layers",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type in rope_parameters in .* is 'yarn', which is not sup"),
        ({"rope_parameters": {"factor": 2.0}}, "rope_parameters in .* is one with factor; expected no entries"),
        ({"linear_num_value_heads": 6}, r"the shape of .*in_proj_qkvz\.weight in .* is \(64, 24\); expected 84 rows"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(peers, tmp_path, change, message):
    folder = shutil.copytree(peers("qwen3-next")[1], tmp_path / "copy")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        from_huggingface(folder)


def test_a_missing_fused_matrix_is_named(peers, tmp_path):
    folder = shutil.copytree(peers("qwen3-next")[1], tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.linear_attn.in_proj_ba.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: .*model\.layers\.0\.linear_attn\.in_proj_ba\.weight\[b\]"):
        from_huggingface(folder)


SHAPE = {"vocab_size": 50, "n_layer": 2, "d_model": 8, "feed_forward": "swiglu", "norm": "rms", "biases": False}
LINEAR = {"n_heads": 2, "norm_epsilon": 1e-5}
ATTENTION = {"n_heads": 2, "norm_epsilon": 1e-5, "window": None}


@pytest.mark.parametrize(
    ("linear", "attention", "message"),
    [
        ({"negative_eigenvalues": True}, {}, "negative_eigenvalues is True; expected False, as of a Qwen3Next"),
        ({"norm_epsilon": 1e-6}, {}, "norm_epsilon is 1e-06; expected that of a Qwen3NextForCausalLM with norm_eps"),
        ({}, {"norm_epsilon": 1e-6}, "norm_epsilon is 1e-06; expected that of a Qwen3NextForCausalLM with norm_eps"),
        ({}, {"window": 5}, "window is 5; expected None"),
    ],
)
def test_other_shapes_are_not_written(linear, attention, message, tmp_path):
    options = {"gated-delta-net": LINEAR | linear, "gated-attention": ATTENTION | attention}
    config = LanguageModelConfig(**SHAPE, mixer=list(options), mixer_options=options)
    with pytest.raises(ValueError, match=message):
        to_huggingface(PortableModel(LanguageModel(config), None), tmp_path / "no")


def test_our_own_hybrid_of_published_shape_is_exported(tmp_path):
    options = {"gated-delta-net": {"norm_epsilon": 1e-5}, "gated-attention": ATTENTION}
    model = LanguageModel(LanguageModelConfig(**SHAPE, mixer=list(options), mixer_options=options)).eval()
    to_huggingface(PortableModel(model, None), tmp_path / "theirs")
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    with torch.inference_mode():
        expected = peer(TOKENS, use_cache=False).logits
    torch.testing.assert_close(model(TOKENS)[0], expected, rtol=1e-5, atol=1e-5)
