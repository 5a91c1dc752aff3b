"""The language model: its shape, its options, its errors."""

import pytest
import torch
from tests.models.test_timesformer import moved
from torch.nn import functional

from recurra.mixers.gateloop import GateLoop
from recurra.mixers.relative_attention import RelativeAttention
from recurra.models.language_model import Block, LanguageModel, LanguageModelConfig, MixerBlock


def small(**options) -> LanguageModelConfig:
    return LanguageModelConfig(**{"vocab_size": 7, "n_layer": 2, "d_model": 8, "d_channel_mixing": 16, **options})


def test_table_3_has_the_parameters_that_it_must_have():
    model = LanguageModel(LanguageModelConfig(6, 51, 4, 64, 128))
    d, ffn = 64, 128
    block = (3 * d * d + 3 * d) + (2 * d * d + 2 * d) + (d * d + d) + (2 * d * ffn + d + ffn) + 4 * d
    assert sum(p.numel() for p in model.parameters()) == 6 * d + 4 * block + 2 * d + (51 * d + 51)


def test_tied_embeddings_are_one_matrix():
    model = LanguageModel(small(tie_embeddings=True))
    assert model.head.weight is model.embedding.weight
    assert "head.bias" not in model.state_dict()


def test_a_stack_of_several_mixers_has_options_for_each():
    mixer = ["gateloop", "relative-attention", "gateloop"]
    options = {"relative-attention": {"segment_length": 3, "mem_len": 2}, "gateloop": {"transition": "fixed"}}
    config = LanguageModelConfig(vocab_size=7, n_layer=3, d_model=8, mixer=mixer, mixer_options=options)
    blocks = LanguageModel(config).blocks
    assert [type(block.mixer) for block in blocks] == [GateLoop, RelativeAttention, GateLoop]
    assert blocks[1].mixer.window.segment_length == 3
    assert config.mixers[2] == ("gateloop", {"transition": "fixed"})


def test_blocks_of_time_mixing_alone():
    torch.manual_seed(0)
    model = LanguageModel(small(d_channel_mixing=0)).double()
    assert [type(block) for block in model.blocks] == [MixerBlock, MixerBlock]
    assert not any("feed_forward" in name for name in model.state_dict())
    tokens = torch.randint(7, (2, 5))
    x = model.embedding(tokens)
    for block in model.blocks:
        x = x + block.mixer(block.norm_mixing(x))[0]
    logits, _ = model(tokens)
    torch.testing.assert_close(logits, model.head(model.norm(x)), rtol=1e-12, atol=1e-12)
    first, state = model(tokens[:, :2])
    torch.testing.assert_close(torch.cat([first, model(tokens[:, 2:], state)[0]], 1), logits, rtol=1e-10, atol=1e-10)


def test_norms_after_the_layers_and_of_the_stream():
    torch.manual_seed(0)
    model, tokens = LanguageModel(small(norm_place=["after", "before"])).double(), torch.randint(7, (2, 5))
    assert [block.norm_place for block in model.blocks] == ["after", "before"]
    first, second = model.blocks
    x = model.embedding(tokens)
    x = x + first.norm_mixing(first.mixer(x)[0])
    x = x + first.norm_feed_forward(first.feed_forward(x))
    x = x + second.mixer(second.norm_mixing(x))[0]
    x = x + second.feed_forward(second.norm_feed_forward(x))
    torch.testing.assert_close(model(tokens)[0], model.head(model.norm(x)), rtol=1e-12, atol=1e-12)
    model = LanguageModel(small(norm_place="stream")).double()
    x = model.embedding(tokens)
    for block in model.blocks:
        x = block.norm_mixing(x)
        x = x + block.mixer(x)[0]
        x = block.norm_feed_forward(x)
        x = x + block.feed_forward(x)
    torch.testing.assert_close(model(tokens)[0], model.head(model.norm(x)), rtol=1e-12, atol=1e-12)
    model = LanguageModel(small(norm_place="after", residual_init_scale=0.0))
    assert torch.equal(model(tokens)[0], model.head(model.norm(model.embedding(tokens))))


ACTIVATIONS = {
    "swiglu": functional.silu,
    "geglu": functional.gelu,
    "geglu-tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("feed_forward", ACTIVATIONS)
def test_feed_forward_networks_with_gates(feed_forward, biases):
    torch.manual_seed(0)
    model = LanguageModel(small(feed_forward=feed_forward, biases=biases, norm="rms", norm_epsilon=0.1)).double()
    moved(model, 0.1)
    tokens = torch.randint(7, (2, 5))
    weights = model.state_dict()

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * weights[f"{name}.weight"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + (weights[f"{name}.bias"] if biases else 0)

    x = weights["embedding.weight"][tokens]
    for number, block in enumerate(model.blocks):
        x = x + block.mixer(norm(x, f"blocks.{number}.norm_mixing"))[0]
        normed, name = norm(x, f"blocks.{number}.norm_feed_forward"), f"blocks.{number}.feed_forward"
        hidden = ACTIVATIONS[feed_forward](linear(normed, f"{name}.gate")) * linear(normed, f"{name}.up")
        x = x + linear(hidden, f"{name}.down")
    torch.testing.assert_close(model(tokens)[0], linear(norm(x, "norm"), "head"), rtol=1e-11, atol=1e-11)
    assert any(name.endswith("feed_forward.gate.bias") for name in weights) == biases
    assert ("head.bias" in weights) == biases


@torch.no_grad()
def test_squared_relus_and_blocks_without_a_network():
    torch.manual_seed(0)
    model = LanguageModel(small(feed_forward=["relu-squared", "none"], residual_scale=0.4, logit_scale=3.0)).double()
    assert [type(block) for block in model.blocks] == [Block, MixerBlock]
    tokens, (first, second) = torch.randint(7, (2, 5)), model.blocks
    x = model.embedding(tokens)
    x = x + 0.4 * first.mixer(first.norm_mixing(x))[0]
    inner, outer = first.feed_forward[0], first.feed_forward[3]
    x = x + 0.4 * outer(inner(first.norm_feed_forward(x)).clamp_min(0) ** 2)
    x = x + 0.4 * second.mixer(second.norm_mixing(x))[0]
    expected = 3 * model.head.linear(model.norm(x))
    torch.testing.assert_close(model(tokens)[0], expected, rtol=1e-12, atol=1e-13)


def test_scaled_embeddings_and_capped_logits_with_one_tied_matrix():
    torch.manual_seed(0)
    model = LanguageModel(small(embedding_scale=3.0, logit_cap=0.5, tie_embeddings=True)).double()
    assert model.head.weight is model.embedding.weight
    tokens, targets = torch.randint(7, (2, 5)), torch.randint(7, (2, 5))
    matrix = model.embedding.weight
    x, _ = model.body(3.0 * matrix[tokens], None)
    logits = 0.5 * torch.tanh(x @ matrix.T / 0.5)
    torch.testing.assert_close(model(tokens)[0], logits, rtol=1e-12, atol=1e-12)
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 5)
    torch.testing.assert_close(model.loss(tokens, targets)[0], losses, rtol=1e-12, atol=1e-12)


def test_embedded_tokens_are_normalised():
    model = LanguageModel(small(embedding_norm=True, norm_epsilon=0.1)).double()
    with torch.no_grad():
        model.embedding_norm.weight.uniform_(0.5, 1.5)
        model.embedding_norm.bias.normal_()
    tokens = torch.randint(7, (2, 5))
    x = model.embedding.weight[tokens]
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 0.1).sqrt()
    x, _ = model.body(x * model.embedding_norm.weight + model.embedding_norm.bias, None)
    torch.testing.assert_close(model(tokens)[0], model.head(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{"n_heads": 4}, {"rnn": {}}])
def test_options_of_a_stack_that_belong_to_no_mixer_are_refused(options):
    with pytest.raises(
        ValueError,
        match=r"mixer_options is .*; expected options by the names of the mixers, gateloop, relative-attention",
    ):
        small(mixer=["gateloop", "relative-attention"], mixer_options=options)


def test_initial_scale():
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(1000, None, 1, 64, 256))
    assert model.embedding.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert model.blocks[0].feed_forward[3].weight.std().item() == pytest.approx(256**-0.5, rel=0.05)
    assert model.blocks[0].mixer.qkv.bias.abs().max() == 0


@pytest.mark.parametrize("mixer", ["gateloop", "s4d", "gru"])
@pytest.mark.parametrize("feed_forward", ["gelu", "swiglu"])
def test_scaled_residual_branches(mixer, feed_forward):
    def drawn(scale: float, **options) -> LanguageModel:
        torch.manual_seed(0)
        return LanguageModel(small(mixer=mixer, feed_forward=feed_forward, residual_init_scale=scale, **options))

    scaled = drawn(0.25).state_dict()
    for name, weight in drawn(1.0).state_dict().items():
        writes = name.endswith(("output_projection.weight", "feed_forward.3.weight", "down.weight"))
        assert torch.equal(scaled[name], 0.25 * weight if writes else weight), name
    if mixer != "gru":  # which has no output projection, and starts as it is
        model, tokens = drawn(0.0), torch.randint(7, (2, 5))
        assert torch.equal(model(tokens)[0], model.head(model.norm(model.embedding(tokens))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"residual_init_scale": -1.0}, "residual_init_scale is -1.0; expected at least 0"),
        ({"d_model": -8}, "d_model is -8"),
        ({"d_channel_mixing": 0, "feed_forward": "swiglu"}, "feed_forward is 'swiglu'; expected 'gelu' with"),
        ({"norm": "batch"}, "norm is 'batch'; expected one of layer, rms"),
        ({"norm_place": "both"}, "norm_place is 'both'; expected one of before, after, stream"),
        ({"norm_place": ["after"]}, r"norm_place is \['after'\]; expected one place for each of n_layer = 2"),
        ({"norm_place": "after", "d_channel_mixing": 0}, "norm_place is 'after'; expected 'before' with no feed-"),
        (
            {"norm_place": "after", "feed_forward": "mixture-of-experts"},
            "norm_place is 'after'; expected 'before' o",
        ),
        ({"logit_cap": 0.0}, "logit_cap is 0.0; expected a finite number above 0"),
        ({"mixer": ["gateloop"]}, r"mixer is \['gateloop'\]; expected one name for each of n_layer = 2"),
        (
            {"tie_embeddings": True, "output_size": 5},
            "output_size is 5; expected vocab_size = 7, as tie_embeddings is set",
        ),
    ],
)
def test_impossible_shapes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)
