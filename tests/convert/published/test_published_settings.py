"""Entries of published config.json files that transformers' own classes do not write, and options they do not have."""

from dataclasses import replace

import pytest

from recurra.convert.published import jamba, mamba, mamba2, recurrent_gemma, xlstm  # noqa: F401  registered
from recurra.convert.published.architecture import ARCHITECTURES
from recurra.convert.published.settings import Settings
from recurra.models import LanguageModelConfig

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


def test_mamba2_says_that_it_gates_before_the_norm_and_does_not():
    assert config_of("mamba2", {"norm_before_gate": True, "num_hidden_layers": 2}).mixer == "mamba2"


def test_recurrent_gemma_under_the_names_of_its_published_file():
    entries = {"_block_types": ["recurrent", "attention"], "embeddings_scale_by_sqrt_dim": True, "num_hidden_layers": 3}
    assert config_of("recurrent_gemma", entries).mixer == ["rg-lru", "rotary-attention", "rg-lru"]


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
