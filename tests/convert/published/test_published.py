"""Published models against transformers' own classes: logits, the way back, and what is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.convert.published.conftest import CASES, HYBRID, peer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from recurra.convert.published.folder import from_huggingface, to_huggingface, without_unused_tokens
from recurra.train.formats import _format_of, _read_model, convert_model

TOKENS = torch.randint(50, (2, 19), generator=torch.Generator().manual_seed(1))


def logits_of(peer, tokens, **options):
    with torch.inference_mode():
        return peer(tokens, use_cache=False, **options).logits


@pytest.fixture
def copy(peers, tmp_path):
    """A folder of a peer that a test may change."""

    def copied(name):
        return shutil.copytree(peers(name)[1], tmp_path / name)

    return copied


@pytest.mark.parametrize("name", CASES)
def test_logits_are_the_peers(name, peers):
    peer, folder = peers(name)
    model = from_huggingface(folder).model
    assert not model.training
    expected = logits_of(peer, TOKENS)  # both are rounded, in another order: a part of the largest logit
    torch.testing.assert_close(model(TOKENS)[0], expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    model.train().loss(TOKENS[:, :-1], TOKENS[:, 1:])[0].mean().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    assert [name for name, gradient in gradients.items() if gradient is None or gradient.eq(0).all()] == []


@pytest.mark.parametrize("name", CASES)
def test_the_way_back_is_transformers_own_class(name, peers, tmp_path):
    peer, folder = peers(name)
    to_huggingface(from_huggingface(folder), tmp_path / "back", model_type=peer.config.model_type)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back", experts_implementation="eager").eval()
    assert type(back) is type(peer)
    ours, theirs = back.state_dict(), peer.state_dict()
    assert ours.keys() == theirs.keys()
    if name == "falcon-h1":  # whose multipliers have become products
        ours = theirs
    for name in ours:  # scales kept as distances from 1 are rounded on the way
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=2e-7)
    torch.testing.assert_close(logits_of(back, TOKENS), logits_of(peer, TOKENS), rtol=1e-5, atol=1e-5)


def test_shards_with_an_index(copy):
    folder = copy("mamba")
    whole = from_huggingface(folder).model.state_dict()
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    for number, part in enumerate((names[:5], names[5:])):
        save_file({name: weights[name] for name in part}, folder / f"part-{number}.safetensors")
    places = {name: f"part-{int(name not in names[:5])}.safetensors" for name in names}
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    found = from_huggingface(folder).model.state_dict()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    for wrong in (None, [], {"a": 3}, {"a": ""}, {"a": "../model.safetensors"}):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(ValueError, match="no index; expected an object with weight_map"):
            from_huggingface(folder)
    index.unlink()
    with pytest.raises(FileNotFoundError, match=r"without weights; expected model\.safetensors or pytorch_model\.bin"):
        from_huggingface(folder)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mamba", {"use_bias": True}, r"use_bias in .*config\.json is True, which is not supported; expected False"),
        ("mamba", {"hidden_size": None}, "hidden_size in .* is missing; expected a whole number from 1 to"),
        ("mamba", {"warp_drive": 9}, "is one with warp_drive; expected no entries that this converter does not know"),
        ("mamba", {"model_type": "llama"}, "model_type in .* is 'llama'; expected one of"),
        ("mamba", {"state_size": 6}, r"the shape of backbone\.layers\.0\.mixer\.A_log .* is \(48, 5\); expected"),
        ("mamba", {"num_hidden_layers": 3}, r"not one model's \(missing: backbone\.layers\.2\.norm\.weight"),
        ("mamba", {"num_hidden_layers": 1}, r"unknown: backbone\.layers\.1\.mixer\.A_log, .* and \d more"),
        ("mamba-untied", {"tie_word_embeddings": True}, "differ; expected one in which they are equal, as its config"),
        ("recurrent-gemma", {"rope_theta": 5e5, "rope_parameters": None}, "rope_theta is 500000.0; expected 10000"),
        ("recurrent-gemma", {"block_types": ["mlp"]}, "block_types in .*; expected a list of recurrent, attention"),
        ("jamba", {"num_experts": 16}, r"missing: model\.layers\.1\.feed_forward\.router\.weight"),
        ("jamba-experts", {"num_experts_per_tok": 6}, "top_k is 6; expected at most n_experts = 5"),
        ("jamba-experts", {"num_experts": 4}, r"unknown: model\.layers\.0\.feed_forward\.experts\.4"),
        ("jamba-experts", {"num_experts": 1}, r"missing: model\.layers\.0\.feed_forward\.gate_proj"),
        ("jamba", {"attn_layer_offset": 0}, r"missing: model\.layers\.0\.self_attn\.q_proj\.weight"),
        ("qwen3-next", {"mlp_only_layers": [1]}, r"missing: model\.layers\.0\.mlp\.gate\.weight"),
        (
            "qwen3-next-experts",
            {"moe_intermediate_size": 8},
            r"experts\.0\.gate_proj\.weight .* is \(7, 24\); expected \(8",
        ),
        ("qwen3-next-experts", {"norm_topk_prob": 1}, "norm_topk_prob in .* is 1; expected true or false"),
        ("qwen3-next-experts", {"decoder_sparse_step": 2}, r"missing: model\.layers\.0\.mlp\.gate_proj\.weight"),
        (
            "falcon-h1",
            {"projectors_bias": True},
            "projectors_bias in .* is True, which is not supported; expected False",
        ),
        ("falcon-h1", {"ssm_multipliers": [1.0]}, r"ssm_multipliers in .* is \[1\.0\]; expected a list of 5 numbers"),
        ("falcon-h1", {"mlp_multipliers": [1.0, 0]}, r"mlp_multipliers in .* is 0\.0; expected a number above 0"),
        ("falcon-h1", {"key_multiplier": -1}, r"key_multiplier in .* is -1\.0; expected a number above 0"),
        (
            "falcon-h1",
            {"mamba_d_ssm": 36, "mamba_d_head": 6},
            r"in_proj\.weight .* is \(90, 24\); expected \(102, 24\)",
        ),
        ("falcon-h1", {"mamba_d_head": 6}, r"mamba_n_heads \* mamba_d_head is 36; expected mamba_d_ssm = 30"),
        ("falcon-h1", {"mamba_rms_norm": True}, r"missing: model\.layers\.0\.mamba\.norm\.weight"),
        (
            "granite",
            {"position_embedding_type": "alibi"},
            "position_embedding_type in .* 'alibi'; expected one of None, nop",
        ),
        ("granite", {"residual_multiplier": 0.0}, "residual_multiplier in .* is 0.0; expected a number above 0"),
        ("granite", {"logits_scaling": -1}, "logits_scaling in .* is -1.0; expected a number above 0"),
        (
            "granite",
            {"normalization_function": "layernorm"},
            "normalization_function in .* is 'layernorm', which is not",
        ),
        (
            "granite",
            {"num_local_experts": 0},
            r"the shape of .*shared_mlp\.input_linear|unknown: model\.layers\.0\.block_sp",
        ),
        (
            "granite",
            {"layer_types": ["mamba"]},
            "layer_types is .*; expected one of linear_attention, .* for each of 3",
        ),
        ("granite", {"attention_bias": True}, "attention_bias in .* is True, which is not supported; expected False"),
        (
            "granite-rope",
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5; expected 1",
        ),
        (
            "granite",
            {"time_step_limit": [0.0, 1.0]},
            r"time_step_limit in .* is \[0\.0, 1\.0\], which is not supported",
        ),
        ("qwen3-next", {"layer_types": ["full_attention"]}, "layer_types is .*, full_attention for each of 2 layers"),
        ("qwen3-next", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type in rope_parameters in .* is 'yarn', whi"),
        ("qwen3-next", {"rope_parameters": {"factor": 2.0}}, "rope_parameters in .* is one with factor; expected no e"),
        ("bamba", {"mamba_proj_bias": True}, "mamba_proj_bias in .* is True, which is not supported; expected False"),
        ("bamba", {"attention_bias": True}, "attention_bias in .* is True, which is not supported; expected False"),
        ("bamba", {"mlp_bias": True}, "mlp_bias in .* is True, which is not supported; expected False"),
        ("bamba", {"time_step_limit": [0.0, 1.0]}, r"time_step_limit in .* is \[0\.0, 1\.0\], which is not supported"),
        (
            "bamba",
            {"mamba_d_head": 9},
            r"mamba_n_heads \* mamba_d_head is 54; expected mamba_expand",
        ),
        (
            "bamba",
            {"rope_parameters": {"partial_rotary_factor": 1.0}},
            "partial_rotary_factor is 1.0; expected 0.5",
        ),
        ("bamba", {"attn_layer_indices": [2]}, r"missing: model\.layers\.1\.mamba"),
        (
            "nemotron",
            {"layers_block_type": ["mlp", "mamba"]},
            "layers_block_type is .*; expected mixers and feed-forward",
        ),
        ("nemotron", {"layers_block_type": ["mamba", "moe"]}, r"missing: backbone\.layers\.1\.mixer\.gate\.weight"),
        ("nemotron-experts", {"mlp_bias": True}, "mlp_bias in .* is True, which is not supported; expected False"),
        ("nemotron-experts", {"n_group": 4}, "n_groups is 4; expected groups of at least 2 of 6 experts"),
        ("nemotron-experts", {"moe_latent_size": 8}, r"missing: backbone\.layers\.1\.mixer\.fc1_latent_proj"),
        ("nemotron-latent-experts", {"moe_latent_size": None}, r"unknown: backbone\.layers\.1\.mixer\.fc1_latent"),
        (
            "nemotron",
            {"layers_block_type": ["mamba", "mlp", "mlp"]},
            "expected mixers and feed-forward networks, each network after a mixer",
        ),
        (
            "nemotron",
            {"layers_block_type": None},
            r"missing: backbone\.layers\.1\.mixer\.gate\.weight",
        ),
        (
            "nemotron",
            {"hybrid_override_pattern": "MX"},
            r"hybrid_override_pattern in .* is 'MX'; expected a text of the",
        ),
        (
            "nemotron",
            {"mlp_hidden_act": "silu"},
            "mlp_hidden_act in .* is 'silu', which is not supported; expected 'relu2'",
        ),
        ("nemotron", {"layers_block_type": None, "hybrid_override_pattern": "M-*M"}, r"unknown: backbone\.layers\.4\."),
        ("lfm2", {"block_use_swiglu": False}, "block_use_swiglu in .* is False, which is not supported; expected True"),
        ("lfm2", {"use_pos_enc": False}, "use_pos_enc in .* is False, which is not supported; expected True"),
        ("lfm2", {"tie_embedding": False}, "tie_embedding in .* is False; expected that of tie_word_embeddings, True"),
        ("lfm2", {"block_ff_dim": 32}, "block_ff_dim in .* is 32; expected that of intermediate_size, 31"),
        ("lfm2", {"block_auto_adjust_ff_dim": False}, r"feed_forward\.w1.* is \(24, 24\); expected \(31, 24\)"),
        ("lfm2", {"layer_types": ["conv"]}, "layer_types is .*; expected one of conv, full_attention for each of 3"),
        ("lfm2", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5; expected 1.0, as"),
        ("lfm2", {"num_experts": 8}, "is one with num_experts; expected no entries that this converter does not know"),
        ("lfm2", {"conv_bias": True}, r"missing: model\.layers\.0\.conv\.in_proj\.bias"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": []}, r"unknown: model\.layers\.1\.self_attn\.k_layernorm"),
        (
            "lfm2-experts",
            {"use_expert_bias": False},
            "use_expert_bias in .* is False, which is not supported; expected T",
        ),
        ("lfm2-experts", {"num_dense_layers": 0}, r"missing: model\.layers\.0\.feed_forward\.gate\.weight"),
        (
            "lfm2-experts",
            {"routed_scaling_factor": 0},
            r"routed_scaling_factor in .* is 0\.0; expected a number above 0",
        ),
        ("kimi", {"attention_bias": True}, "attention_bias in .* is True, which is not supported; expected False"),
        ("kimi", {"mla_use_nope": False}, "mla_use_nope in .* is False, which is not supported; expected True"),
        ("kimi", {"num_key_value_heads": 1}, "num_key_value_heads in .* is 1, which is not supported; expected 3 or"),
        ("kimi", {"moe_router_activation_func": "softmax"}, "is 'softmax', which is not supported; expected 'sigmoid'"),
        ("kimi", {"num_expert_group": 4}, "n_groups is 4; expected groups of at least 2 of 6 experts"),
        ("kimi", {"n_group": 2}, "n_group in .* is 2; expected that of num_expert_group, 1"),
        ("kimi", {"layer_types": None}, r"missing: model\.layers\.1\.self_attn\.A_log"),
        ("kimi", {"q_lora_rank": 9}, r"missing: model\.layers\.1\.self_attn\.q_a_proj\.weight"),
        (
            "kimi",
            {"linear_attn_config": {"num_heads": 3}},
            r"A_log .* is \(1, 1, 2, 1\); expected \(1, 1, 3, 1\)",
        ),
        ("kimi", {"linear_attn_config": {"rank": 3}}, "linear_attn_config in .* is one with rank; expected no entries"),
        (
            "kimi",
            {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2]}},
            r"full_attn_layers and kda_layers is \(\[2\], \[1, 2\]\); expected each of 3 layers once, from 1",
        ),
        ("minimax", {"hidden_act": "gelu"}, "hidden_act in .* is 'gelu', which is not supported; expected 'silu' or"),
        ("minimax", {"mlp_alpha_factor": 2.0}, r"mlp_alpha_factor is \[1\.0, 1\.0, 2\.0\]; expected one number: diff"),
        ("minimax", {"mlp_beta_factor": 0.0}, r"mlp_beta_factor in .* is 0\.0; expected a number above 0"),
        ("minimax", {"head_dim": 8}, r"the shape of .*qkv_proj.* is \(72, 24\); expected 96 rows"),
        ("minimax", {"layer_types": ["linear_attention"]}, "layer_types is .*, full_attention for each of 3 layers"),
        ("minimax", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; expected 1.0, as"),
        ("zamba2", {"add_bias_linear": True}, "add_bias_linear in .* is True, which is not supported; expected False"),
        (
            "zamba2",
            {"use_long_context": True},
            "use_long_context in .* is True, which is not supported; expected False",
        ),
        ("zamba2", {"layers_block_type": ["hybrid"]}, "layers_block_type is .*, hybrid, mamba for each of 5 layers"),
        (
            "zamba2",
            {"hybrid_layer_ids": [1]},
            r"hybrid_layer_ids in .* is \[1\], which is not supported; expected \[1, 2",
        ),
        ("zamba2", {"num_mem_blocks": 1}, r"unknown: model\.layers\.2\.shared_transformer\.feed_forward\.down_proj"),
        (
            "zamba2",
            {"use_shared_attention_adapter": True},
            r"missing: model\.layers\.1\.shared_transformer.*adapter_list",
        ),
        ("zamba2-adapters", {"num_key_value_heads": 2}, "num_key_value_heads is 2; expected 4 with adapters"),
        ("olmo", {"attention_bias": True}, "attention_bias in .* is True, which is not supported; expected False"),
        ("olmo", {"hidden_act": "gelu"}, "hidden_act in .* is 'gelu', which is not supported; expected 'silu' or"),
        ("olmo", {"layer_types": HYBRID[:1]}, "layer_types is .*; expected one of linear_attention, .* for each of 2"),
        ("olmo", {"linear_key_head_dim": 7}, r"the shape of .*linear_attn\.q_proj.* is \(12, 24\); expected \(14,"),
        ("olmo", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5; expected 1.0, as"),
        ("olmo", {"rope_parameters": {"rope_theta": 9.0}, "rope_theta": "x"}, "rope_theta in .* is 'x'; expected a fi"),
        ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate in .* is False, which is not supported"),
        ("qwen3.5", {"attention_bias": True}, "attention_bias in .* is True, which is not supported; expected False"),
        ("qwen3.5", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type in rope_parameters in .* is 'yarn', whic"),
        ("qwen3.5", {"num_experts": 8}, "is one with num_experts; expected no entries that this converter does not"),
        ("qwen3.5", {"model_type": "qwen3_5"}, "text_config in .* is None; expected an object"),
        ("qwen3.5", {"model_type": "qwen3_5_moe_text"}, r"missing: model\.layers\.0\.mlp\.gate\.weight"),
        ("qwen3.5-experts", {"model_type": "qwen3_5_moe"}, "text_config in .* is None; expected an object"),
        ("qwen3.5-experts", {"norm_topk_prob": False}, "norm_topk_prob in .* is False, which is not supported; expect"),
        ("qwen3.5-experts", {"attn_output_gate": False}, "attn_output_gate in .* is False, which is not supported"),
        ("qwen3.5-experts", {"num_experts": 5}, r"unknown: model\.layers\.0\.mlp\.experts\.5\.down_proj\.weight"),
        ("qwen3.5", {"linear_key_head_dim": 7}, r"the shape of .*in_proj_qkv.* is \(44, 24\); expected \(48, 24\)"),
        ("qwen3-next", {"linear_num_value_heads": 6}, r"the shape of .*in_proj_qkvz.* is \(64, 24\); expected 84 rows"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(copy, name, change, message):
    folder = copy(name)
    file = folder / "config.json"
    entries = {**json.loads(file.read_text()), **change}
    file.write_text(json.dumps({key: value for key, value in entries.items() if value is not None}))
    with pytest.raises(ValueError, match=message):
        from_huggingface(folder)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-experts"])
def test_the_language_model_of_a_model_of_images_and_text(copy, peers, name):
    """As Qwen/Qwen3.5-0.8B and -35B-A3B are published: transformers' class for text reads the same weights of them."""
    folder = copy(name)
    expected = from_huggingface(folder).model(TOKENS)[0]
    text = json.loads((folder / "config.json").read_text())
    tied = text.pop("tie_word_embeddings")
    text |= {"tie_word_embeddings": not tied}  # as transformers' default may have it: the outer entry counts
    text |= {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
    kind = text["model_type"].removesuffix("_text")
    whole = {"architectures": ["ForConditionalGeneration"], "model_type": kind, "image_token_id": 9}
    whole |= {"text_config": text, "vision_config": {"depth": 27}, "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(whole))
    weights = peers(name)[0].state_dict()  # where the experts of a block are one tensor
    weights = {name.replace("model.", "model.language_model."): weight for name, weight in weights.items()}
    others = {name: torch.ones(3) for name in ("model.visual.norm.weight", "mtp.norm.weight")}
    save_file(weights | others, folder / "model.safetensors")
    assert _format_of(folder) == "published"
    assert torch.equal(from_huggingface(folder).model(TOKENS)[0], expected)
    (folder / "config.json").write_text(json.dumps(whole | {"audio_config": {}}))
    with pytest.raises(ValueError, match="is one with audio_config; expected no entries that this converter does not"):
        from_huggingface(folder)


def test_the_names_of_liquid_ais_own_folders(copy):
    folder = copy("lfm2")
    expected = from_huggingface(folder).model(TOKENS)[0]
    entries = json.loads((folder / "config.json").read_text())
    entries |= {"block_ff_dim": entries.pop("intermediate_size"), "tie_embedding": entries.pop("tie_word_embeddings")}
    entries |= {"rope_theta": entries.pop("rope_parameters")["rope_theta"], "layer_types": None, "full_attn_idxs": [1]}
    entries |= {"block_dim": 24, "block_use_swiglu": True, "block_norm_eps": 1e-5, "conv_dim": 24, "num_heads": 4}
    (folder / "config.json").write_text(json.dumps(entries))
    assert torch.equal(from_huggingface(folder).model(TOKENS)[0], expected)


def test_the_names_of_moonshot_ais_own_folders(copy):
    """As moonshotai/Kimi-Linear-48B-A3B-Instruct: sizes in a section, layers by their numbers from 1."""
    folder = copy("kimi")
    expected = from_huggingface(folder).model(TOKENS)[0]
    entries = json.loads((folder / "config.json").read_text())
    sizes = {"head_dim": entries.pop("linear_head_dim"), "num_heads": entries.pop("linear_num_heads")}
    sizes |= {"short_conv_kernel_size": entries.pop("linear_conv_kernel_dim")}
    entries |= {"linear_attn_config": sizes | {"full_attn_layers": [2], "kda_layers": [1, 3]}, "layer_types": None}
    entries |= {"first_k_dense_replace": 1, "mlp_layer_types": None, "mla_use_nope": True, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(entries))
    weights = load_file(folder / "model.safetensors")
    weights = {name.replace("layers.0.block_sparse_moe", "layers.0.mlp"): x for name, x in weights.items()}
    save_file(weights, folder / "model.safetensors")
    assert torch.equal(from_huggingface(folder).model(TOKENS)[0], expected)


def test_the_convolutions_and_names_of_ais_own_folders(copy):
    """As allenai/Olmo-Hybrid-7B: the parts of a convolution are those of q, k and v, and no layer of attention has a
    norm that is called `feedforward_layer_norm`, as transformers calls it when it saves one."""
    folder = copy("olmo")
    expected = from_huggingface(folder).model(TOKENS)[0]
    weights, layer = load_file(folder / "model.safetensors"), "model.layers.0.linear_attn"
    names = [f"{layer}.{part}_conv1d.weight" for part in "qkv"]
    rows = [len(weights[f"{layer}.{part}_proj.weight"]) for part in "qkv"]
    assert [len(weights[name]) for name in names] != rows
    weights |= zip(names, torch.cat([weights[name] for name in names]).split(rows))
    moved = weights.pop("model.layers.1.feedforward_layer_norm.weight")
    save_file(weights | {"model.layers.1.post_attention_layernorm.weight": moved}, folder / "model.safetensors")
    assert torch.equal(from_huggingface(folder).model(TOKENS)[0], expected)
    del weights[names[1]]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: .*linear_attn\.conv1d\.weight.*unknown: .*q_conv1d\.weight"):
        from_huggingface(folder)


def test_a_missing_fused_matrix_is_named(copy):
    folder = copy("qwen3-next")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.linear_attn.in_proj_ba.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: .*model\.layers\.0\.linear_attn\.in_proj_ba\.weight\[b\]"):
        from_huggingface(folder)


def tokenizer_of(n_tokens):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate(alphabet)}
    merges = [("a", letter) for letter in "bcdefghij"][: n_tokens - 256]
    words |= {left + right: 256 + number for number, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(words, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture
def with_tokenizer(tmp_path):
    """A published Mamba of 264 rows whose tokenizer has 260 tokens."""
    model, folder = peer("mamba", vocab_size=264), tmp_path / "peer"
    model.save_pretrained(folder)
    tokenizer_of(260).save(str(folder / "tokenizer.json"))
    return model, folder


def test_a_run_has_the_tokens_of_the_tokenizer(with_tokenizer, tmp_path):
    peer, folder = with_tokenizer
    assert _format_of(folder) == "published"
    assert from_huggingface(folder).model.config.vocab_size == 264
    assert convert_model(folder, tmp_path / "run", "run") <= 1e-5
    tokens = torch.randint(260, (1, 9))
    run = _read_model(tmp_path / "run")
    assert run.model.config.vocab_size == len(run.tokenizer) == 260
    torch.testing.assert_close(run.model(tokens)[0], logits_of(peer, tokens)[..., :260], rtol=1e-5, atol=1e-5)
    assert convert_model(tmp_path / "run", tmp_path / "back", "published") == 0
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    torch.testing.assert_close(logits_of(back, tokens), logits_of(peer, tokens)[..., :260], rtol=1e-6, atol=1e-6)
    assert _read_model(tmp_path / "back").tokenizer.encode("abba\n").tolist() == run.tokenizer.encode("abba\n").tolist()


ENDS = {"eos_token_id": [37, 10**9]}
DEFAULT = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "\n{{ x }}"}]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"chat_template": "x"}}, '{% set eos_tokens = ["E"] %}\nx'),  # of config.json
        ({"tokenizer_config.json": {"chat_template": DEFAULT[:1]}}, None),
        ({"tokenizer_config.json": {"chat_template": {"default": "x"}}}, None),
        (
            {"tokenizer_config.json": {"chat_template": DEFAULT, "bos_token": "s", "eos_token": {"content": "é"}}},
            '{% set bos_token = "s" %}\n{% set eos_token = "é" %}\n{% set eos_tokens = ["é", "E"] %}\n\n{{ x }}',
        ),
        (
            {"tokenizer_config.json": {"chat_template": "x", "eos_token": '"'}, "generation_config.json": ENDS},
            '{% set eos_token = "\\"" %}\n{% set eos_tokens = ["\\"", "F"] %}\nx',
        ),
    ],
    ids=str,
)
def test_a_chat_template_sets_its_special_tokens(with_tokenizer, files, expected):
    _, folder = with_tokenizer
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 36}
    for name, content in {"config.json": config, **files}.items():
        (folder / name).write_text(json.dumps(content))
    assert from_huggingface(folder).chat_template == expected


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(with_tokenizer):
    _, folder = with_tokenizer
    tokenizer_of(265).save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="the model's vocabulary is 264 tokens; expected the 265 of its tokenizer"):
        without_unused_tokens(from_huggingface(folder))


@pytest.mark.slow
@pytest.mark.compile  # while torch.export traces, sizes are symbols, which the shape checks refuse
@pytest.mark.parametrize("name", ["jamba-without-attention", "xlstm"])
def test_the_onnx_graph_computes_what_the_model_computes(name, peers):
    pytest.importorskip("onnxscript", reason="needs the extra export: pip install recurra[export]")
    from recurra.convert.export.onnx_file import OnnxModel, largest_difference, to_onnx

    model = from_huggingface(peers(name)[1]).model
    assert largest_difference(model, OnnxModel(to_onnx(model).SerializeToString())) <= 1e-5
