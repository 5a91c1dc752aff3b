"""Hugging Face's whole config as options of a published TimeSformer."""

import pytest
from tests.convert.test_convert_timesformer import HEADS, KINDS, hugging_face, original

from recurra.video._published import _timesformer_from_huggingface, _timesformer_from_original


@pytest.mark.parametrize("attention", KINDS)
def test_the_whole_config_is_taken(attention):
    port = hugging_face(attention)
    given = {**port.config.to_dict(), "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.1}
    config = _timesformer_from_huggingface(port.state_dict(), **given, num_labels=5).config
    assert (config.attention, config.n_frames, config.n_heads, config.n_classes) == (attention, 3, HEADS, 5)
    assert (config.dropout, config.attention_dropout, config.drop_path) == (0.2, 0.1, 0.0)


def test_edges_may_be_given_twice():
    port = hugging_face()
    given = {**port.config.to_dict(), "image_size": [12, 12], "patch_size": (4, 4)}
    assert _timesformer_from_huggingface(port.state_dict(), **given).config.image_size == 12
    with pytest.raises(ValueError, match=r"image_size or patch_size is \[12, 16\]; expected two equal edges"):
        _timesformer_from_huggingface(port.state_dict(), **{**given, "image_size": [12, 16]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qkv_bias": False}, "qkv_bias is False; expected True"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; expected 'gelu'"),
        ({"layer_norm_eps": 1e-5}, "layer_norm_eps is 1e-05; expected 1e-06"),
        ({"attention_type": "time_only"}, "attention_type is 'time_only'; expected one of divided_space_time"),
        ({"attention_type": "joint_space_time"}, "attention is given as joint; in the weights it is divided"),
        ({"num_frames": 3, "n_frames": 4}, "n_frames is 4; expected what says the same as num_frames = 3"),
        ({"pruned_heads": {0: [1]}}, "pruned_heads is {0: .*; expected none"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        _timesformer_from_huggingface(hugging_face().state_dict(), n_heads=HEADS, **options)


def test_over_space_alone_the_frames_are_asked_for():
    weights = original(hugging_face("space"))
    with pytest.raises(ValueError, match="n_frames is missing; expected the frames of a segment"):
        _timesformer_from_original(weights, n_heads=HEADS)
    assert _timesformer_from_original(weights, n_heads=HEADS, num_frames=2).config.n_frames == 2
