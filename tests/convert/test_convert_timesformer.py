"""TimeSformer weights in both published layouts, against Hugging Face's own model with the same weights."""

import pytest
import torch
from transformers import TimesformerConfig, TimesformerForVideoClassification

from recurra.video._published import own_weights, start_from
from recurra.video.crvit import CompactRecurrentViT, CompactRecurrentViTConfig
from recurra.video.timesformer import TimeSformer, TimeSformerConfig

FRAMES, HEADS = 3, 3
CLOSE = {"rtol": 1e-9, "atol": 1e-10}
SIZES = {"n_layer": 2, "d_model": 12, "n_heads": HEADS, "d_channel_mixing": 20, "patch_size": 4, "n_classes": 5}
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


def hugging_face() -> TimesformerForVideoClassification:
    """The port in float64 with random weights."""
    config = TimesformerConfig(
        image_size=12, patch_size=4, num_frames=FRAMES, hidden_size=12, num_hidden_layers=2, num_labels=5,
        num_attention_heads=HEADS, intermediate_size=20,
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


def make(**options) -> TimeSformer:
    return TimeSformer(TimeSformerConfig(**{**SIZES, "n_frames": FRAMES, "image_size": 12, **options})).double().eval()


def started(weights, folder, **options) -> TimeSformer:
    model = make(**options)
    torch.save(weights, folder / "weights.pyth")
    start_from(model, str(folder / "weights.pyth"))
    return model


def draw(edge=12):
    return torch.randn(2, FRAMES, 3, edge, edge, dtype=torch.float64)


@pytest.mark.parametrize(
    "weights_of",
    [
        original,
        lambda port: original(port, ""),
        lambda port: {"epoch": 15, "state_dict": original(port, "module.model."), "cfg": "..."},
        lambda port: port.state_dict(),
    ],
)
def test_logits_are_the_port_s(weights_of, tmp_path):
    port, clip = hugging_face(), draw()
    torch.testing.assert_close(started(weights_of(port), tmp_path)(clip)[0][:, 0], port(clip).logits, **CLOSE)


@pytest.mark.parametrize("edge", [8, 20])
def test_another_resolution_takes_the_nearest_patch_s_position(edge, tmp_path):
    """As the original's forward pass does, which the port keeps."""
    port, clip = hugging_face(), draw(edge=edge)
    port.config.image_size = edge  # for the port's own counting of patches
    found = started(original(port), tmp_path, image_size=edge)(clip)[0]
    torch.testing.assert_close(found[:, 0], port(clip).logits, **CLOSE)


def test_a_cr_vit_of_more_classes_than_channels_keeps_its_own_classifier(tmp_path):
    options = {**SIZES, "n_classes": 30, "n_frames": FRAMES, "image_size": 12}
    model = CompactRecurrentViT(CompactRecurrentViTConfig(**options)).double()
    before = {name: tensor.clone() for name, tensor in model.head.state_dict().items()}
    torch.save(original(hugging_face()), tmp_path / "weights.pyth")
    assert "a fresh classifier: 5 classes there" in start_from(model, str(tmp_path / "weights.pyth"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.head.state_dict().items())


def test_every_name_is_known_and_none_other():
    port = hugging_face()
    names = make().state_dict().keys()
    assert own_weights(port.state_dict()).keys() == own_weights(original(port)).keys() == names
    assert own_weights({"model.blocks.0.gate.weight": torch.zeros(1)}).keys() == {"blocks.0.gate.weight"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks.1.mlp.fc2.weight": torch.zeros(12, 21)}, r"feed_forward\.3\.weight \(12, 21\), here \(12, 20\)"),
        ({"blocks.0.gate": torch.zeros(1)}, r"blocks\.0\.gate \(1,\), here missing"),
        ({"time_embed": None}, r"encoder\.times missing, here"),
        ({"pos_embed": torch.zeros(1, 9, 12)}, "of 8 patches'; expected those of a square frame"),
        ({"head.weight": None}, r"without head\.weight; expected the weights of a TimeSformer"),
    ],
)
def test_weights_that_do_not_fit_are_named(change, message, tmp_path):
    weights = {**original(hugging_face(), ""), **change}
    with pytest.raises(ValueError, match=message):
        started({name: tensor for name, tensor in weights.items() if tensor is not None}, tmp_path)
