"""TimeSformer weights in both published layouts, against Hugging Face's own model with the same weights."""

import pytest
import torch
from transformers import TimesformerConfig, TimesformerForVideoClassification

from recurra.video._published import _timesformer_from_huggingface, _timesformer_from_original

FRAMES, HEADS = 3, 3
KINDS = {"divided": "divided_space_time", "joint": "joint_space_time", "space": "space_only"}
CLOSE = {"rtol": 1e-9, "atol": 1e-10}
TO_ORIGINAL = {
    "timesformer.embeddings.cls_token": "cls_token",
    "timesformer.embeddings.position_embeddings": "pos_embed",
    "timesformer.embeddings.time_embeddings": "time_embed",
    "timesformer.embeddings.patch_embeddings.projection": "patch_embed.proj",
    "timesformer.encoder.layer": "blocks",
    "timesformer.layernorm": "norm",
    "classifier": "head",
    "temporal_attention.attention.qkv": "temporal_attn.qkv",
    "temporal_attention.output.dense": "temporal_attn.proj",
    "temporal_layernorm": "temporal_norm1",
    "temporal_dense": "temporal_fc",
    "attention.attention.qkv": "attn.qkv",
    "attention.output.dense": "attn.proj",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}


def hugging_face(attention="divided", n_frames=FRAMES) -> TimesformerForVideoClassification:
    """The port in float64 with random weights."""
    config = TimesformerConfig(
        image_size=12, patch_size=4, num_frames=n_frames, hidden_size=12, num_hidden_layers=2, num_labels=5,
        num_attention_heads=HEADS, intermediate_size=20, attention_type=KINDS[attention],
    )  # fmt: skip
    port = TimesformerForVideoClassification(config).double().eval()
    with torch.no_grad():
        for parameter in port.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return port


def original(port, prefix="model."):
    """The port's weights as the original code names them."""
    renamed = {}
    for name, tensor in port.state_dict().items():
        for theirs, own in TO_ORIGINAL.items():
            name = name.replace(theirs, own)
        renamed[prefix + name] = tensor
    return renamed


def convert(port, layout="original", **options):
    if layout == "original":
        return _timesformer_from_original(original(port), n_heads=HEADS, **options)
    return _timesformer_from_huggingface(port.state_dict(), n_heads=HEADS, **options)


def draw(n_frames=FRAMES, edge=12):
    return torch.randn(2, n_frames, 3, edge, edge, dtype=torch.float64)


@pytest.mark.parametrize("layout", ["original", "huggingface"])
@pytest.mark.parametrize("attention", ["divided", "joint"])
def test_logits_are_the_port_s(attention, layout):
    port, clip = hugging_face(attention), draw()
    model = convert(port, layout)
    assert model.config.attention == attention
    torch.testing.assert_close(model(clip)[0][:, 0], port(clip).logits, **CLOSE)


@pytest.mark.parametrize("layout", ["original", "huggingface"])
def test_over_space_alone_a_single_frame_gives_the_port_s_logits(layout):
    """With more frames the port does not take their mean; tests/models checks the mean."""
    port, clip = hugging_face("space"), draw(1)
    model = convert(port, layout, n_frames=1)
    assert model.config.attention == "space"
    torch.testing.assert_close(model(clip)[0][:, 0], port(clip).logits, **CLOSE)


@pytest.mark.parametrize(
    ("prefix", "container"), [("", None), ("module.", "model_state"), ("module.model.", "state_dict")]
)
def test_prefixes_and_checkpoints(prefix, container):
    port, clip = hugging_face(), draw()
    weights = original(port, prefix)
    checkpoint = weights if container is None else {"epoch": 15, container: weights, "cfg": "TRAIN: ..."}
    found = _timesformer_from_original(checkpoint, n_heads=HEADS)(clip)[0]
    torch.testing.assert_close(found[:, 0], port(clip).logits, **CLOSE)


def test_sizes_are_read_from_the_weights():
    config = convert(hugging_face(), drop_path=0.0, head_dropout=0.5).config
    assert (config.n_classes, config.n_frames, config.image_size, config.patch_size) == (5, 3, 12, 4)
    assert (config.n_layer, config.d_model, config.d_channel_mixing, config.n_heads) == (2, 12, 20, HEADS)
    assert (config.n_channels, config.drop_path, config.head_dropout) == (3, 0.0, 0.5)


@pytest.mark.parametrize("edge", [8, 20])
def test_another_resolution_takes_the_nearest_patch_s_position(edge):
    """As the original's forward pass does, which the port keeps."""
    port, clip = hugging_face(), draw(edge=edge)
    port.config.image_size = edge  # for the port's own counting of patches
    found = convert(port, image_size=edge)(clip)[0]
    torch.testing.assert_close(found[:, 0], port(clip).logits, **CLOSE)


@pytest.mark.parametrize(("n_frames", "nearest"), [(6, [0, 0, 1, 1, 2, 2]), (2, [0, 1]), (4, [0, 0, 1, 2])])
def test_another_number_of_frames_takes_the_nearest_time(n_frames, nearest):
    port = hugging_face()
    times = convert(port, n_frames=n_frames).encoder.times
    assert torch.equal(times, port.timesformer.embeddings.time_embeddings[0, nearest])


def test_other_classes_start_with_a_fresh_head():
    port, clip = hugging_face(), draw()
    model = convert(port, n_classes=7)
    assert model(clip)[0].shape == (2, 1, 7)
    assert not model.head.bias.any()
    assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.3)
    model.head = convert(port).head
    torch.testing.assert_close(model(clip)[0][:, 0], port(clip).logits, **CLOSE)


def test_heads_of_64_channels_are_the_default():
    config = TimesformerConfig(
        image_size=4, patch_size=4, num_frames=2, hidden_size=128, num_hidden_layers=1, num_labels=2,
        num_attention_heads=2, intermediate_size=8,
    )  # fmt: skip
    port, clip = TimesformerForVideoClassification(config).double().eval(), draw(2, 4)
    model = _timesformer_from_huggingface(port.state_dict())
    assert model.config.n_heads == 2
    torch.testing.assert_close(model(clip)[0][:, 0], port(clip).logits, **CLOSE)
    with pytest.raises(ValueError, match="with d_model = 12 a head cannot have the usual 64 channels; give n_heads"):
        _timesformer_from_original(original(hugging_face()))


def test_a_missing_name_is_named():
    whole = original(hugging_face(), "")
    for name in whole:
        weights = {other: tensor for other, tensor in whole.items() if other != name}
        with pytest.raises(ValueError, match=f"missing: {name}"):
            _timesformer_from_original(weights, n_heads=HEADS)


def test_unknown_names_are_named():
    weights = {**original(hugging_face()), "model.blocks.0.gate": torch.zeros(1), "model.dist_token": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"unknown: blocks\.0\.gate, dist_token"):
        _timesformer_from_original(weights, n_heads=HEADS)


def test_shapes_that_do_not_fit_are_named():
    weights = original(hugging_face(), "")
    weights["blocks.1.mlp.fc2.weight"] = torch.zeros(12, 21)
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp\.fc2\.weight does not fit: \(12, 21\).*\(12, 20\)"):
        _timesformer_from_original(weights, n_heads=HEADS)
    weights = {**original(hugging_face(), ""), "cls_token": torch.zeros(12, 1)}
    with pytest.raises(ValueError, match=r"cls_token does not fit: \(12, 1\).*\(12,\)"):
        _timesformer_from_original(weights, n_heads=HEADS)
    weights["pos_embed"] = torch.zeros(1, 9, 12)
    with pytest.raises(ValueError, match="pos_embed has 8 patches; expected those of a square frame"):
        _timesformer_from_original(weights, n_heads=HEADS)


def test_the_same_name_twice_is_refused():
    weights = original(hugging_face())
    with pytest.raises(ValueError, match=r"with and without model\."):
        _timesformer_from_original({**weights, "cls_token": weights["model.cls_token"]})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"d_modle": 8}, TypeError, "no option d_modle; there are: .*d_model"),
        ({"d_model": 10}, ValueError, "d_model is given as 10; in the weights it is 12"),
        ({"image_size": 10}, ValueError, "patch_size is 4; expected a divisor of image_size = 10"),
    ],
)
def test_options_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        convert(hugging_face(), **options)
