"""Entries of published config.json files that transformers' own classes do not write, and options they do not have."""

import json
import math
from dataclasses import replace

import pytest
from tests.convert.published.conftest import CASES, ROTATION

from recurra.convert.published._settings import Settings
from recurra.convert.published.folder import ARCHITECTURES
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.models.registry import on_meta

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
    settings = Settings(entries, "config.json")
    config = ARCHITECTURES[model_type].config(settings)
    settings.finish()
    return config


def test_xlstm_under_the_names_of_its_published_file():
    config = config_of("xlstm", XLSTM)
    assert (config.d_model, config.n_layer, config.mixer_options["n_heads"]) == (64, 3, 4)


@pytest.mark.parametrize("entry", [{"add_qk_norm": True}, {"add_post_blocks_norm": False}, {"cell_norm_eps": 1e-3}])
def test_xlstm_of_another_form_is_refused(entry):
    with pytest.raises(ValueError, match=rf"^{next(iter(entry))} in config.json is .*, which is not supported"):
        config_of("xlstm", XLSTM | entry)


@pytest.mark.parametrize(("key", "theirs"), [("hidden_size", "embedding_dim"), ("num_hidden_layers", "num_blocks")])
def test_sizes_that_contradict_each_other_are_refused(key, theirs):
    with pytest.raises(ValueError, match=rf"^{theirs} is {XLSTM[theirs]}; expected that of {key}, 128"):
        config_of("xlstm", XLSTM | {key: 128})


def test_recurrent_gemma_under_the_names_of_its_published_file():
    entries = {"_block_types": ["recurrent", "attention"], "embeddings_scale_by_sqrt_dim": True, "num_hidden_layers": 3}
    assert config_of("recurrent_gemma", entries).mixer == ["rg-lru", "rotary-attention", "rg-lru"]


WRONG = [None, True, -1, 0, 0.3, 5, 10**12, 10**400, 1e308, math.nan, -math.inf, "x", [], [1], [[None]]]
WRONG += [["x"], {}, {"a": 1}, {"rope_theta": None}, {"rope_theta": [1]}, {"partial_rotary_factor": math.nan}]
OLDER = {
    "recurrent_gemma": ("_block_types", "head_dim", "partial_rotary_factor", "rope_theta"),
    "qwen3_next": ("decoder_sparse_step", "num_experts", "partial_rotary_factor", "rope_theta"),
    "rwkv": ("attention_hidden_size",),
    "xlstm": ("embedding_dim", "num_blocks"),
}
"""Entries that the config.json of transformers does not have, or not always."""
FIRST_CASES = {kind: name for name, (kind, _) in reversed(CASES.items())}.values()
"""One case of each class."""


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


@pytest.mark.parametrize(
    ("model_type", "entry", "message"),
    [
        ("recurrent_gemma", {"rope_parameters": [1]}, r"^rope_parameters in c.json is \[1\]; expected an object$"),
        ("recurrent_gemma", {"rope_theta": None}, "^rope_theta in c.json is None; expected a finite number$"),
        ("qwen3_next", {"mlp_only_layers": 3}, "^mlp_only_layers in c.json is 3; expected a list of whole numbers$"),
        ("qwen3_next", {"num_experts": -1}, "^num_experts in c.json is -1; expected a whole number from 0 to"),
        (
            "jamba",
            {"mamba_dt_rank": 0.5},
            "^mamba_dt_rank in c.json is 0.5; expected a whole number above 0, null or 'auto'",
        ),
        (
            "qwen3_next",
            {"partial_rotary_factor": 5, "num_experts": 0},
            "^partial_rotary_factor is 5.0; expected a share from 0 to 1$",
        ),
        ("xlstm", {"qk_dim_factor": math.nan}, "^qk_dim_factor in c.json is nan; expected a finite number$"),
        ("xlstm", {"v_dim_factor": 1e308}, r"^v_dim_factor \* hidden_size is inf; expected a number of channels$"),
        (
            "rwkv",
            {"num_hidden_layers": 10**9},
            "^num_hidden_layers in c.json is 10{9}; expected a .* from 1 to 1000000$",
        ),
    ],
    ids=str,
)
def test_an_entry_of_another_kind_is_refused_by_name(model_type, entry, message):
    with pytest.raises(ValueError, match=message):
        ARCHITECTURES[model_type].config(Settings({"num_experts": 1, **entry}, "c.json"))


def griffin(**options) -> LanguageModelConfig:
    return LanguageModelConfig(
        vocab_size=9,
        n_layer=2,
        d_model=16,
        d_channel_mixing=8,
        mixer=["rg-lru", "rotary-attention"],
        mixer_options={
            "rg-lru": {"n_heads": 4},
            "rotary-attention": {"n_heads": 4, "rotated_share": 0.5, "window": 5, "output_bias": True, **options},
        },
    )


def test_a_griffin_is_written_with_its_own_defaults():
    architecture = ARCHITECTURES["recurrent_gemma"]
    config = replace(griffin(), mixer_options={"rg-lru": {"n_heads": 4}, "rotary-attention": {"output_bias": True}})
    settings = architecture.settings(config)
    assert settings["attention_window_size"] == 128
    assert settings["rope_parameters"]["partial_rotary_factor"] == 1.0
    assert len(architecture.rules(replace(config, mixer_options={"rotary-attention": {}}))) > 10


@pytest.mark.parametrize(
    ("option", "value"),
    [("window", None), ("rotation_base", 5e5), ("output_bias", False), ("n_heads", 2), ("d_head", 8)],
)
def test_a_griffin_that_transformers_does_not_have_is_refused(option, value):
    with pytest.raises(ValueError, match=rf"^{option} of rotary-attention is {value}; expected"):
        ARCHITECTURES["recurrent_gemma"].settings(griffin(**{option: value}))


def test_a_falcon_with_scales_is_refused():
    options = {"selection_norm": 1e-6, "selection_scales": True}
    config = LanguageModelConfig(9, None, 1, 16, 0, mixer="mamba", mixer_options=options)
    with pytest.raises(ValueError, match=r"^selection_scales of mamba is True; expected False"):
        ARCHITECTURES["falcon_mamba"].fits(config)
