"""Transformer-XL's loss, ties and sizes. Its cuts are in tests/contracts, and what it computes in tests/convert."""

import copy

import pytest
import torch
from tests.models.test_timesformer import moved

from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig

VOCABULARY = 11
SMALL = {"n_layer": 2, "d_model": 12, "n_heads": 2, "d_channel_mixing": 16, "segment_length": 4, "mem_len": 6}
VARIANTS = {
    "plain": {},
    "transformer": {"mem_len": 0},
    "same-length": {"same_length": True, "clamp_len": 3},
    "pre-norm": {"norm": "pre", "share_biases": False},
    "adaptive": {"cutoffs": [4, 7]},
    "adaptive-divided": {"cutoffs": [4, 7], "div_val": 2},
    "untied": {"cutoffs": [4, 7], "d_embedding": 6, "tie_embeddings": False, "d_head": 5},
}


def build(**options) -> TransformerXL:
    config = TransformerXLConfig(vocab_size=VOCABULARY, **{**SMALL, "dropout": 0.0, **options})
    return moved(TransformerXL(config).double(), 0.1)


@pytest.fixture(params=VARIANTS)
def model(request) -> TransformerXL:
    return build(**VARIANTS[request.param])


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length))


def test_the_loss_is_that_of_the_logits(model):
    x, targets = tokens(3, 10), tokens(3, 10)
    targets[1, 4:8] = -100
    losses, _ = model.loss(x, targets)
    chosen = model(x)[0].log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(losses, -chosen * (targets >= 0), rtol=1e-10, atol=1e-12)


def test_no_gradient_between_segments(model):
    x = torch.arange(8).expand(2, -1)  # all different: gradients of the embedding tell the steps apart
    untied = build(**{**vars_of(model), "tie_embeddings": False})
    untied.loss(x, torch.where(x < 4, -100, x))[0].sum().backward()
    reached = torch.cat([table.grad.abs().sum(1) for table in untied.embedding.tables]).nonzero().flatten()
    assert reached.tolist() == [4, 5, 6, 7]


def test_norms_before_the_layers_get_gradients_from_the_memory():
    """The memory's part of their gradient: zero if memories were normalised when they were kept."""
    model = build(norm="pre", share_biases=False)
    with torch.no_grad():
        _, state = model(tokens(1, SMALL["segment_length"]))
    attention, norm_attention = model.blocks[0].attention, model.blocks[0].norm_attention
    x = torch.zeros(1, 1, SMALL["d_model"], dtype=torch.float64)  # its own norm is the bias: no gradient to the weight
    attention(x, state.layers[0], norm=norm_attention)[0].sum().backward()
    assert norm_attention.weight.grad.abs().sum() > 1e-3


def vars_of(model):
    return {name: value for name, value in vars(model.config).items() if name != "vocab_size"}


def test_the_memory_matters_unless_there_is_none():
    x = tokens(2, 8)
    for mem_len in (0, 1, 6):
        model = build(mem_len=mem_len)
        carried, alone = model(x)[0][:, 4:], model(x[:, 4:])[0]
        assert torch.allclose(carried, alone, rtol=1e-10, atol=1e-12) == (mem_len == 0)


def test_ties():
    model = build(cutoffs=[4, 7], div_val=2)
    assert all(one is other for one, other in zip(model.head.tables, model.embedding.tables))
    shared = [one is other for one, other in zip(model.head.projections, model.embedding.projections)]
    assert shared == [False, True, True]
    assert model.attentions[0].content_bias is model.attentions[1].content_bias
    own = build(tie_embeddings=False, share_biases=False)
    assert own.head.tables[0] is not own.embedding.tables[0]
    assert own.attentions[0].position_bias is not own.attentions[1].position_bias
    twin = copy.deepcopy(model)
    assert twin.head.tables[0] is twin.embedding.tables[0]
    assert twin.head.tables[0] is not model.embedding.tables[0]


def test_the_published_number_of_parameters():
    """WikiText-103, 16 layers: 151M (Transformer-XL, table 1)."""
    with torch.device("meta"):
        model = TransformerXL(
            TransformerXLConfig(vocab_size=267_735, segment_length=150, cutoffs=[20_000, 40_000, 200_000])
        )
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == 151


def test_locked_dropout_is_the_same_at_every_step():
    """Same tokens, no attention to tell the steps apart: only a mask that changes over time could."""
    x = torch.full((3, 4), 7)
    for kind, same in (("locked", True), ("independent", False)):
        model = build(dropout=0.5, dropout_over_time=kind)
        with torch.no_grad():
            for attention in model.attentions:
                attention.output_projection.weight.zero_()
        y = model(x)[0]
        assert torch.allclose(y, y[:, :1].expand_as(y)) == same
        assert not torch.allclose(y[0], y[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment_length": 0}, "segment_length is 0"),
        ({"mem_len": -1}, "mem_len is -1"),
        ({"clamp_len": 0}, "clamp_len is 0"),
        ({"d_embedding": 0}, "d_embedding is 0; expected at least 1"),
        ({"mem_len": 0, "same_length": True}, "same_length"),
        ({"cutoffs": [7, 4]}, r"cutoffs is \[7, 4\]"),
        ({"cutoffs": [4, 11]}, r"cutoffs is \[4, 11\]"),
        (
            {"cutoffs": [4], "tie_projections": [True]},
            r"tie_projections is \[True\]; expected one entry for each of the 2 clusters",
        ),
        ({"norm": "sideways"}, "norm is 'sideways'; expected one of post, pre"),
        ({"dropout_over_time": "never"}, "dropout_over_time is 'never'; expected one of independent, locked"),
        ({"n_layer": 0}, "n_layer is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"attention_dropout": -0.1}, "attention_dropout is -0.1"),
    ],
)
def test_impossible_shapes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TransformerXLConfig(vocab_size=VOCABULARY, **{**SMALL, **options})


def test_functional_call_leaves_tied_tables_as_they_were():
    model = build(cutoffs=[4, 7])
    weights = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    tokens = torch.randint(VOCABULARY, (2, 5))
    before = model(tokens)[0]
    torch.func.functional_call(model, weights, (tokens,))
    assert torch.equal(model(tokens)[0], before)
    assert all(one is other for one, other in zip(model.head.tables, model.embedding.tables))
