"""A peer's whole config as options of a published Transformer-XL."""

import pytest
import torch
from tests.convert.test_convert_transformer_xl import CUTOFFS, hugging_face, published_weights

from recurra.convert.transformer_xl import transformer_xl_from_original

HUGGING_FACE = {
    "vocab_size": 13, "cutoffs": tuple(CUTOFFS), "d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 3, "d_inner": 10,
    "div_val": 2, "pre_lnorm": False, "n_layer": 2, "mem_len": 6, "clamp_len": 3, "same_length": True,
    "proj_share_all_but_first": True, "attn_type": 0, "sample_softmax": -1, "adaptive": True, "dropout": 0.2,
    "dropatt": 0.1, "untie_r": True, "init": "normal", "init_range": 0.01, "proj_init_std": 0.01, "init_std": 0.02,
    "layer_norm_epsilon": 1e-5, "eos_token_id": 0, "tie_word_embeddings": True, "tie_weight": True, "ext_len": 0,
    "tie_projs": [False, True, True, True], "model_type": "transfo-xl", "architectures": ["TransfoXLLMHeadModel"],
    "task_specific_params": {"text-generation": {"do_sample": True}}, "transformers_version": "4.35.0",
    "return_dict": True, "output_hidden_states": False, "output_attentions": False, "torchscript": False,
    "torch_dtype": None, "use_bfloat16": False, "tf_legacy_loss": False, "pruned_heads": {}, "is_decoder": False,
    "is_encoder_decoder": False, "cross_attention_hidden_size": None, "add_cross_attention": False,
    "tie_encoder_decoder": False, "max_length": 20, "min_length": 0, "do_sample": False, "early_stopping": False,
    "num_beams": 1, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0,
    "id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}, "tokenizer_class": None, "prefix": None,
    "bos_token_id": None, "pad_token_id": None, "sep_token_id": None, "problem_type": None, "_name_or_path": "",
}  # fmt: skip
ORIGINAL = {
    "data": "../data/enwik8", "dataset": "enwik8", "n_layer": 2, "n_head": 2, "d_head": 3, "d_embed": -1, "d_model": 8,
    "d_inner": 10, "dropout": 0.1, "dropatt": 0.0, "init": "normal", "emb_init": "normal", "init_range": 0.1,
    "emb_init_range": 0.01, "init_std": 0.02, "proj_init_std": 0.01, "optim": "adam", "lr": 0.00025, "mom": 0.0,
    "scheduler": "cosine", "warmup_step": 0, "decay_rate": 0.5, "lr_min": 0.0, "clip": 0.25, "clip_nonemb": False,
    "max_step": 100000, "batch_size": 60, "batch_chunk": 1, "tgt_len": 4, "eval_tgt_len": 50, "ext_len": 0,
    "mem_len": 6, "not_tied": False, "seed": 1111, "cuda": True, "adaptive": False, "div_val": 1, "pre_lnorm": True,
    "varlen": False, "multi_gpu": True, "log_interval": 200, "eval_interval": 4000, "work_dir": "LM-TFM",
    "restart": False, "restart_dir": "", "debug": False, "same_length": False, "attn_type": 0, "clamp_len": -1,
    "eta_min": 0.0, "gpu0_bsz": -1, "max_eval_steps": -1, "sample_softmax": -1, "patience": 0, "finetune_v2": False,
    "finetune_v3": False, "fp16": False, "static_loss_scale": 1, "dynamic_loss_scale": False, "tied": True,
    "n_token": 13, "n_all_param": 1000, "n_nonemb_param": 900,
}  # fmt: skip
NEEDED = {"tgt_len": 4, "mem_len": 6, "pre_lnorm": False}


def without(options, *names):
    return {name: value for name, value in options.items() if name not in names}


def test_a_whole_config_of_hugging_face():
    weights = hugging_face(published_weights(cutoffs=CUTOFFS, div_val=2, untie_r=True))
    config = transformer_xl_from_original(weights, segment_length=4, **HUGGING_FACE).config
    assert (config.segment_length, config.mem_len, config.same_length, config.clamp_len) == (4, 6, True, 3)
    assert (config.norm, config.share_biases, config.dropout, config.attention_dropout) == ("post", False, 0.2, 0.1)
    assert (config.cutoffs, config.tie_embeddings) == (CUTOFFS, True)
    assert config.tied_projections == [False, True, True, True]


def test_hugging_face_s_summary_of_the_tied_projections():
    weights = published_weights(cutoffs=CUTOFFS, div_val=2, tie_projs=[False] * 4)
    options = {**NEEDED, "div_val": 2, "proj_share_all_but_first": False}
    model = transformer_xl_from_original(weights, cutoffs=CUTOFFS, **options)
    assert model.config.tied_projections == [False] * 4
    with pytest.raises(ValueError, match=r"cutoffs is missing; expected .* with proj_share_all_but_first False"):
        transformer_xl_from_original(weights, **options)
    with pytest.raises(ValueError, match="proj_share_all_but_first is False; expected what says the same as tie_projs"):
        transformer_xl_from_original(weights, **options, cutoffs=CUTOFFS, tie_projs=[False, True, True, True])


def test_all_arguments_of_the_original():
    config = transformer_xl_from_original(published_weights(), **ORIGINAL).config
    assert (config.segment_length, config.mem_len, config.same_length, config.clamp_len) == (4, 6, False, None)
    assert (config.norm, config.cutoffs, config.tie_embeddings, config.dropout) == ("pre", [], True, 0.1)
    untied = transformer_xl_from_original(
        published_weights(tie_weight=False), **{**ORIGINAL, "not_tied": True, "tied": False}
    )
    assert not untied.config.tie_embeddings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_type": 2}, "attn_type is 2; expected 0: absolute attention is not supported"),
        ({"attn_type": 7}, "attn_type is 7; expected 0: there is no such attention"),
        ({"sample_softmax": 100}, "sample_softmax is 100; expected at most 0"),
        ({"ext_len": 2}, "ext_len is 2; expected 0"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06; expected 1e-05"),
        ({"pruned_heads": {0: [1]}}, "pruned_heads is {0: .*; expected none"),
        ({"adaptive": False, "cutoffs": [4, 7]}, "adaptive is False; expected True with cutoffs"),
        ({"tie_weight": False, "tie_word_embeddings": True}, "tie_word_embeddings is True; .* tie_weight = False"),
        ({"n_head": 2, "n_heads": 3}, "n_heads is 3; expected what says the same as n_head = 2"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        transformer_xl_from_original(published_weights(), **NEEDED, **options)


@pytest.mark.parametrize("name", ["tgt_len", "mem_len", "pre_lnorm"])
def test_what_the_weights_do_not_tell_is_asked_for(name):
    own = {"tgt_len": "segment_length", "pre_lnorm": "norm"}.get(name, name)
    with pytest.raises(ValueError, match=f"{own} is missing; expected .*: the weights do not tell"):
        transformer_xl_from_original(published_weights(), **without(NEEDED, name))


@pytest.mark.parametrize("name", ["same_length", "clamp_len"])
def test_where_the_two_codes_have_other_defaults_hugging_face_s_weights_ask(name):
    given = {**NEEDED, "same_length": False, "clamp_len": -1}
    weights = hugging_face(published_weights())
    assert transformer_xl_from_original(weights, **given).config.clamp_len is None
    with pytest.raises(ValueError, match=f"{name} is missing"):
        transformer_xl_from_original(weights, **without(given, name))
    config = transformer_xl_from_original(published_weights(), **NEEDED).config
    assert (config.same_length, config.clamp_len) == (False, None)


@pytest.mark.parametrize("name", ["pre_lnorm", "same_length", "untie_r", "adaptive"])
def test_flags_are_flags(name):
    with pytest.raises(TypeError, match=f"{name} is 'no'; expected True or False"):
        transformer_xl_from_original(published_weights(), **{**NEEDED, name: "no"})


def test_weights_of_absolute_attention_are_refused_plainly():
    weights = published_weights()
    weights["layers.0.dec_attn.kv_net.weight"] = torch.zeros(12, 8)
    with pytest.raises(ValueError, match="absolute attention is not supported"):
        transformer_xl_from_original(weights, **NEEDED)
