"""Entries of published config.json files that transformers' own classes do not write, and options they do not have."""

import json
import math
import re
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file
from tests.convert.published.conftest import CASES, ROTATION
from transformers import AutoModelForCausalLM

from recurra.convert.portable import PortableModel
from recurra.convert.published import folder as _folder
from recurra.convert.published._rules import read_config
from recurra.convert.published._settings import Settings
from recurra.convert.published.folder import ARCHITECTURES, from_huggingface, to_huggingface
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.models.registry import on_meta

BASICS = {"vocab_size": 9, "hidden_size": 64, "num_hidden_layers": 3}
XLSTM = {
    "add_embedding_dropout": False,
    "add_forward_backend_padding": False,
    "add_out_norm": True,
    "add_post_blocks_norm": True,
    "add_post_norm": False,
    "add_qk_norm": False,
    "cell_norm_eps": 1e-6,
    "embedding_dim": 64,
    "force_bos_token_insert": True,
    "head_dim": 16,
    "igate_bias_init_range": -10.0,
    "mlstm_round_up_to_multiple_of": 64,
    "num_blocks": 3,
    "num_heads": 4,
}


def config_of(model_type, entries):
    return read_config(ARCHITECTURES[model_type], Settings(BASICS | entries, "config.json"))


def test_the_names_of_published_files():
    config = config_of("xlstm", XLSTM | {"hidden_size": 64})
    assert (config.d_model, config.n_layer, config.mixer_options["n_heads"]) == (64, 3, 4)
    with pytest.raises(ValueError, match=r"^embedding_dim in .* is 64; expected that of hidden_size, 128"):
        config_of("xlstm", XLSTM | {"hidden_size": 128})
    entries = {"_block_types": ["recurrent", "attention"], "embeddings_scale_by_sqrt_dim": True}
    assert config_of("recurrent_gemma", entries).mixer == ["rg-lru", "rotary-attention", "rg-lru"]


WRONG = [None, True, -1, 0, 0.3, 5, 10**12, 10**400, 1e308, math.nan, -math.inf, "x", [], [1], [[None]]]
WRONG += [["x"], {}, {"a": 1}, {"rope_theta": None}, {"rope_theta": [1]}, {"partial_rotary_factor": math.nan}]
OLDER = {
    "recurrent_gemma": ("_block_types", "head_dim", "partial_rotary_factor", "rope_theta"),
    "bamba": ("partial_rotary_factor", "rope_theta", "layer_types", "head_dim"),
    "kimi_linear": (
        "first_k_dense_replace",
        "linear_attn_config",
        "mla_use_nope",
        "moe_layer_freq",
        "use_grouped_topk",
    ),
    "lfm2": ("block_ff_dim", "full_attn_idxs", "head_dim", "rope_theta", "tie_embedding", "use_pos_enc"),
    "qwen3_5_text": ("attn_output_gate", "full_attention_interval", "partial_rotary_factor", "rope_theta"),
    "minimax": ("rope_theta", "partial_rotary_factor", "num_experts"),
    "olmo_hybrid": ("rope_theta", "partial_rotary_factor"),
    "qwen3_5_moe_text": ("intermediate_size", "norm_topk_prob", "full_attention_interval", "mlp_only_layers"),
    "qwen3_next": ("decoder_sparse_step", "num_experts", "partial_rotary_factor", "rope_theta"),
    "rwkv": ("attention_hidden_size",),
    "xlstm": ("embedding_dim", "num_blocks"),
    "zamba2": ("layer_types", "rope_theta"),
}
"""Entries that the config.json of transformers does not have, or not always."""
FIRST_CASES = [*{kind: name for name, (kind, _) in reversed(CASES.items())}.values(), "nemotron-latent-experts"]
"""One case of each class, and one whose class has other entries if it has experts."""


def outcome(model_type, entries, known):
    """What becomes of a config.json: a new model is outlined, for its layers may refuse what the converter took."""
    try:
        config = config_of(model_type, entries)
        if config != known and config.n_layer < 10:
            with on_meta():
                LanguageModel(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "made"


@pytest.mark.parametrize("name", FIRST_CASES)
def test_a_wrong_entry_is_refused_in_a_sentence_or_makes_a_model(peers, name):
    whole = json.loads((peers(name)[1] / "config.json").read_text())
    model_type = whole["model_type"]
    known = config_of(model_type, whole)
    for key in {*whole, *OLDER.get(model_type, ())} - {"model_type"}:
        rest = {**whole, "rope_parameters": None} if key in ROTATION else whole  # which would go first
        for wrong in WRONG:
            found = outcome(model_type, {**rest, key: wrong}, known)
            is_sentence = found.startswith("ValueError: ") and "; expected" in found
            assert found == "made" or is_sentence or "Storage size calculation overflowed" in found, (key, wrong, found)


UNREAD = {
    "falcon-h1": {"attn_layer_indices": None, "sliding_window": None},
    "nemotron": {"rms_norm_eps": 0.5, "norm_eps": 0.5, "rope_theta": 5e5, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("name", UNREAD)
def test_entries_of_published_files_that_the_class_does_not_read(peers, name):
    whole = json.loads((peers(name)[1] / "config.json").read_text())
    assert config_of(whole["model_type"], whole | UNREAD[name]) == config_of(whole["model_type"], whole)


@pytest.mark.parametrize("name", FIRST_CASES)
def test_a_tensor_of_a_wrong_shape_is_refused_in_a_sentence(peers, monkeypatch, name):
    folder = peers(name)[1]
    weights = load_file(folder / "model.safetensors")
    unread = ("query_decay", "key_decay", "diagonal_decay")  # of a MiniMax: powers of a decay that is read
    outline = from_huggingface(folder).model.to("meta")  # making it takes longer than all the rest
    monkeypatch.setattr(_folder, "outline_of", lambda *_: outline)
    for key in {re.sub(r"\d+", "#", key): key for key in weights}.values():  # one block's, and one expert's
        tensor = weights[key]
        for damaged in (tensor.new_zeros(()), torch.stack([tensor, tensor], -1), tensor[..., :0], tensor.char()):
            wrong = {**weights, key: damaged}
            monkeypatch.setattr(_folder, "_read_folder_weights", lambda _, wrong=wrong: dict(wrong))
            is_unread = key.endswith(unread) and damaged.is_floating_point()
            with nullcontext() if is_unread else pytest.raises(ValueError, match="; expected"):
                from_huggingface(folder)


def test_a_decay_that_is_not_positive_is_refused(peers, monkeypatch):
    folder = peers(next(name for name, (kind, _) in CASES.items() if kind == "MiniMax"))[1]
    weights = load_file(folder / "model.safetensors")
    slope = next(key for key in weights if key.endswith("slope_rate"))
    monkeypatch.setattr(_folder, "_read_folder_weights", lambda _: weights | {slope: -weights[slope].abs()})
    with pytest.raises(ValueError, match=r"slope_rate is one with -.*; expected positive numbers"):
        from_huggingface(folder)


def test_layers_of_a_kimi_that_disagree_are_refused(peers):
    whole = json.loads((peers("kimi")[1] / "config.json").read_text())
    n_layer = whole["num_hidden_layers"]
    with pytest.raises(ValueError, match=r"full_attn_layers and kda_layers is .*; expected each of"):
        config_of("kimi_linear", whole | {"linear_attn_config": {"full_attn_layers": [1]}})
    all_linear = {"full_attn_layers": [], "kda_layers": list(range(1, n_layer + 1))}
    given = ["full_attention", *["linear_attention"] * (n_layer - 1)]
    with pytest.raises(ValueError, match=r"layer_types is .*; expected the layers of linear_attn_config"):
        config_of("kimi_linear", whole | {"linear_attn_config": all_linear, "layer_types": given})


MAMBA = {"selection_norm": 1e-5, "selection_scales": True}
ATTENTION = {"n_heads": 2, "norm_epsilon": 1e-5, "window": None}
GRIFFIN = {"n_heads": 2, "rotated_share": 0.5, "window": 5, "output_bias": True}
BAMBA = {"n_heads": 2, "rotated_share": 0.5, "window": None, "dropout": 0.1}
JAMBA = {"n_heads": 2, "rotated_share": 0.0, "window": None}
DELTA = {"n_heads": 2, "norm_epsilon": 1e-5}
OLMO = {"n_heads": 2, "rotated_share": 0.0, "window": None, "qk_norm": 1e-5, "qk_norm_over": "all"}
LATENT = {"n_heads": 2, "rotation_base": None, "window": None, "d_query_latent": 5}
ZAMBA = {"n_heads": 2, "window": None, "n_mamba_heads": 1, "least_step": 0.01}
SHAPE = {"vocab_size": 50, "d_model": 8, "d_channel_mixing": 16, "feed_forward": "swiglu", "norm": "rms"}
HYBRIDS: dict[str, dict] = {
    "jamba": {"mamba": MAMBA, "rotary-attention": JAMBA},
    "attention first": {"rotary-attention": JAMBA, "mamba": MAMBA},
    "jamba without attention": {"mamba": MAMBA},
    "bamba": {"mamba2": {"n_heads": 4, "n_groups": 2}, "rotary-attention": BAMBA},
    "bamba without attention": {"mamba2": {}},
    "lfm2": {"short-conv": {"biases": True}, "rotary-attention": {"n_heads": 2, "window": None, "qk_norm": 1e-5}},
    "lfm2 without attention": {"short-conv": {"kernel_size": 1}},
    "qwen3_5_text": {"gated-delta-net": DELTA, "gated-attention": ATTENTION},
    "olmo_hybrid": {"gated-delta-net": {"n_heads": 2}, "rotary-attention": OLMO},
    "kimi_linear": {"kda": {"n_heads": 2}, "mla": LATENT},
    "zamba2": {"mamba2": {"d_state": 64, "least_step": 0.01}, "zamba2": ZAMBA},
}
CHANGES = {
    "olmo_hybrid": {"norm_place": ["before", "after"]},
    "zamba2": {"d_channel_mixing": 0, "feed_forward": "gelu", "tie_embeddings": True},
}


def portable(options, mixers=None, **changes) -> PortableModel:
    mixers = mixers or list(options)
    shape = {**SHAPE, "biases": False, "n_layer": len(mixers), **changes}
    config = LanguageModelConfig(mixer=mixers, mixer_options=options, **shape)
    return PortableModel(LanguageModel(config).eval(), None)


@pytest.mark.parametrize("name", HYBRIDS)
def test_our_own_hybrid_of_published_shape_is_exported(name, tmp_path):
    ours, tokens = portable(HYBRIDS[name], **CHANGES.get(name, {})), torch.randint(50, (2, 21))
    to_huggingface(ours, tmp_path / "theirs")
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    with torch.inference_mode():
        torch.testing.assert_close(ours.model(tokens)[0], peer(tokens, use_cache=False).logits, rtol=1e-5, atol=1e-5)


def test_a_class_may_be_chosen_where_two_have_the_shape(tmp_path):
    ours = portable(HYBRIDS["qwen3_5_text"])
    to_huggingface(ours, tmp_path / "next", model_type="qwen3_next")
    assert json.loads((tmp_path / "next/config.json").read_text())["model_type"] == "qwen3_next"
    with pytest.raises(ValueError, match=r"mixer is .*; expected one that transformers has a class for: mlstm"):
        to_huggingface(ours, tmp_path / "no", model_type="xlstm")
    with pytest.raises(ValueError, match="model_type is 'llama'; expected one of jamba, "):
        to_huggingface(ours, tmp_path / "no", model_type="llama")


def olmo(places=("before", "after"), **options) -> PortableModel:
    hybrid = HYBRIDS["olmo_hybrid"]
    hybrid = {**hybrid, "rotary-attention": hybrid["rotary-attention"] | options}
    return portable(hybrid, norm_place=list(places))


def lfm2(**options) -> PortableModel:
    return portable({"short-conv": {}, "rotary-attention": HYBRIDS["lfm2"]["rotary-attention"] | options})


def granite(experts=None, **options) -> PortableModel:
    changes = {"feed_forward_options": EXPERTS["feed_forward_options"] | (experts or {})}
    hybrid = {"mamba2": {"n_heads": 4, "n_groups": 2}, "rotary-attention": GRANITE | options}
    return portable(hybrid, **{**EXPERTS, **changes}, residual_scale=0.3, logit_scale=1 / 6)


def test_our_own_models_with_experts_are_exported(tmp_path):
    """Whose sizes transformers' products of groups take."""
    of_qwen = EXPERTS["feed_forward_options"] | {"shared_gate": True}
    of_jamba = {"n_experts": 4, "normalise": False}
    for number, ours in enumerate(
        (
            granite(),
            portable(HYBRIDS["qwen3_5_text"], feed_forward=FORWARD, feed_forward_options=of_qwen),
            portable(HYBRIDS["qwen3_5_text"], feed_forward=EXPERTS["feed_forward"], feed_forward_options=of_qwen),
            portable(HYBRIDS["jamba"], feed_forward=FORWARD, feed_forward_options=of_jamba),
            portable(MINIMAX, feed_forward="mixture-of-experts", feed_forward_options={}, norm_place="stream"),
        )
    ):
        folder, tokens = tmp_path / str(number), torch.randint(50, (2, 21))
        to_huggingface(ours, folder)
        peer = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.inference_mode():
            expected = peer(tokens, use_cache=False).logits
            torch.testing.assert_close(ours.model(tokens)[0], expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(from_huggingface(folder).model(tokens)[0], ours.model(tokens)[0])


def griffin(**options) -> PortableModel:
    others = {"feed_forward": "geglu-tanh", "norm_epsilon": 1e-6, "biases": True, "embedding_scale": 2.828125}
    return portable({"rg-lru": {"n_heads": 2}, "rotary-attention": GRIFFIN | options}, logit_cap=30.0, **others)


def test_a_griffin_whose_head_is_no_embedding_has_a_bias_of_zeros(tmp_path):
    ours, folder, tokens = griffin(), tmp_path / "theirs", torch.randint(50, (2, 21))
    to_huggingface(ours, str(folder))
    assert json.loads((folder / "config.json").read_text())["attention_window_size"] == 5
    assert "lm_head.bias" not in load_file(folder / "model.safetensors")  # transformers' class would ignore it
    peer = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        torch.testing.assert_close(ours.model(tokens)[0], peer(tokens, use_cache=False).logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(from_huggingface(folder).model(tokens)[0], ours.model(tokens)[0])
    ours.model.head.linear.bias.data[3] = 0.5
    with pytest.raises(ValueError, match=r"^head\.linear\.bias is not zero; expected zeros, as the head of a Recurr"):
        to_huggingface(ours, tmp_path / "no")
    assert not (tmp_path / "no").exists()


EXPERTS = {
    "feed_forward": "mixture-of-experts",
    "feed_forward_options": {"n_experts": 4, "top_k": 2, "d_expert": 8, "d_shared": 8},
}
FORWARD = ["swiglu", "mixture-of-experts"]
MINIMAX = {"lightning-attention": {"n_heads": 2}, "rotary-attention": {"n_heads": 2, "window": 5}}
GRANITE = {"n_heads": 4, "n_kv_heads": 2, "d_head": 8, "rotated_share": 0.0, "window": None, "query_scale": 0.4}
MAMBA_2_LAYERS = ["rotary-attention", "rotary-attention", "mamba"]
RWKV = {"rwkv4": {}, "rwkv4-channel-mixing": {}}
LAYER_NORM = {"d_channel_mixing": 0, "feed_forward": "gelu", "norm": "layer"}
PLAIN = {"d_channel_mixing": 0, "feed_forward": "gelu"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: portable({"gateloop": {}}),
            r"mixer is \['gateloop'\]; expected one that transformers has",
        ),
        (lambda: portable({"mamba": {}}, **PLAIN, biases=True), "biases True instead of False; .* MambaForCausalLM"),
        (lambda: portable({"mamba": MAMBA}, **PLAIN), "selection_scales True instead of False of mamba; .* a FalconM"),
        (lambda: portable({"mamba": {}}), r"selection_scales False instead of True of mamba; .* a JambaF"),
        (lambda: portable({"mamba": MAMBA | {"selection_norm": 1e-6}}), "selection_norm 1e-06 instead of 1e-05"),
        (lambda: portable(HYBRIDS["jamba"], MAMBA_2_LAYERS), "expected attention at equal distances"),
        (lambda: portable({"mamba": MAMBA, "rotary-attention": JAMBA | {"window": 5}}), "window 5 instead of None"),
        (lambda: portable({"mamba": MAMBA, "rotary-attention": JAMBA | {"d_head": 6}}), r"qkv\.weight \(36, 8\)"),
        (lambda: portable({"gated-delta-net": DELTA | {"negative_eigenvalues": True}}), "negative_eigenvalues True in"),
        (lambda: portable({"gated-delta-net": DELTA | {"norm_epsilon": 1e-6}}), "norm_epsilon 1e-06 instead of 1e-05"),
        (lambda: granite(rotated_share=0.25), "rotated_share 0.25 instead of 1.0 of rotary-attention"),
        (lambda: granite(output_bias=True), "output_bias True instead of False of rotary-attention"),
        (lambda: granite(experts={"shared_gate": True}), "shared_gate True instead of False of mixture-of-experts"),
        (lambda: granite(experts={"normalise": False}), "normalise False instead of True of mixture-of-experts"),
        (lambda: granite(experts={"scale": 2.0}), "scale 2.0 instead of 1.0 of mixture-of-experts"),
        (lambda: granite(experts={"d_shared": 0}), "d_shared 0 instead of 1 of mixture-of-experts"),
        (lambda: portable({"mamba": MAMBA, "rotary-attention": JAMBA}, **EXPERTS), "d_shared 8 instead of 0 of mixt"),
        (
            lambda: portable({"gated-delta-net": DELTA}, **EXPERTS),
            "shared_gate False instead of True of mixture-of-experts",
        ),
        (
            lambda: portable({"mamba": MAMBA}, ["mamba"] * 4, feed_forward=[*FORWARD, *FORWARD[::-1]]),
            "feed_forward is .*; expected experts at equal distances, as of a JambaForCausalLM",
        ),
        (
            lambda: portable({"mamba2": {}, "rotary-attention": GRANITE}, feed_forward=FORWARD),
            "feed_forward .* instead of .*; expected the shape of a GraniteMoeHybridForCausalLM",
        ),
        (lambda: portable({"mamba2": {}}, biases=True), "biases True instead of False; .* a BambaForCausalLM"),
        (lambda: lfm2(qk_norm=1e-6), "qk_norm 1e-06 instead of 1e-05 of rotary-attention; .* a Lfm2ForCausalLM"),
        (lambda: lfm2(qk_norm=None), r"blocks\.1\.mixer\.key_norm\.weight missing"),
        (lambda: lfm2(rotated_share=0.5), "rotated_share 0.5 instead of 1.0 of rotary-attention"),
        (lambda: lfm2(window=5), "window 5 instead of None of rotary-attention"),
        (lambda: lfm2(output_bias=True), "output_bias True instead of False of rotary-attention"),
        (lambda: lfm2(dropout=0.1), "dropout 0.1 instead of 0.0 of rotary-attention"),
        (lambda: olmo(("before", "before")), r"norm_place \['before', 'before'\] instead of \['before', 'after'\]"),
        (lambda: olmo(qk_norm_over="head"), "qk_norm_over 'head' instead of 'all' of rotary-attention; .* OlmoHybrid"),
        (lambda: olmo(rotated_share=0.5), "rotated_share 0.5 instead of 1.0 of rotary-attention"),
        (lambda: olmo(window=5), "window 5 instead of None of rotary-attention"),
        (
            lambda: portable({"kda": {}, "mla": {"window": None}}),
            "rotation_base 10000.0 instead of None of mla; .* Kimi",
        ),
        (lambda: portable({"kda": {}, "mla": LATENT | {"window": 5}}), "window 5 instead of None of mla"),
        (
            lambda: portable({"kda": {"negative_eigenvalues": True}}),
            "negative_eigenvalues True instead of False of kda",
        ),
        (lambda: portable({"kda": {}}, tie_embeddings=True), "expected one that transformers has a class for"),
        (lambda: portable({"lightning-attention": {}}), "norm_place .*'before'.* instead of .*'stream'.* a MiniMaxFor"),
        (
            lambda: portable({"lightning-attention": {"norm_epsilon": 1e-5}}),
            "norm_epsilon 1e-05 instead of 1e-06 of light",
        ),
        (lambda: portable({"zamba2": ZAMBA}, **PLAIN), "expected one that transformers has a class for"),
        (
            lambda: portable({"mamba2": {}, "zamba2": ZAMBA}, **PLAIN),
            "mixer .*zamba2.* instead of 'mamba2'; .* a Mamba2",
        ),
        (
            lambda: portable({"zamba2": ZAMBA | {"window": 5}}, **PLAIN, tie_embeddings=True),
            "window 5 instead of None of",
        ),
        (lambda: portable({"rg-lru": {}}), "logit_cap is None; expected a bound"),
        (lambda: griffin(window=None), "attention_window_size in .* is missing"),
        (lambda: griffin(rotation_base=5e5), "rope_theta is 500000.0; expected 10000.0"),
        (lambda: griffin(output_bias=False), "output_bias False instead of True of rotary-attention"),
        (lambda: griffin(n_heads=1), "n_heads 1 instead of 2 of rotary-attention"),
        (lambda: portable(RWKV, **LAYER_NORM), "embedding_norm False instead of True; .* a RwkvForCausalLM"),
        (lambda: portable({"rwkv4": {}}, **LAYER_NORM, embedding_norm=True), "n_layer 1 instead of 2"),
    ],
)
def test_shapes_that_no_class_of_transformers_has_are_not_written(make, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        to_huggingface(make(), tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("kind", [{}, [], None])
def test_a_model_type_that_is_no_name_is_refused(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ValueError, match=r"model_type in .* expected one of"):
        from_huggingface(tmp_path)
