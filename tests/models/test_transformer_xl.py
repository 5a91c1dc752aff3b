"""Transformer-XL under the contract; its lengths, its loss, its sizes. What it computes is proved in tests/convert."""

import copy

import pytest
import torch

from recurra import state as states
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
    model = TransformerXL(TransformerXLConfig(vocab_size=VOCABULARY, **{**SMALL, "dropout": 0.0, **options})).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # wake the biases, and make everything matter
    return model


@pytest.fixture(params=VARIANTS)
def model(request) -> TransformerXL:
    return build(**VARIANTS[request.param])


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length))


def results(model, x, pieces, state):
    """Losses, logits, last state, and the gradients of a loss over the first and the last, entering state included."""
    leaves = [*model.parameters(), *states.tensors(state)]
    logits, losses, with_loss = [], [], state
    for piece in x.split(pieces, 1):
        y, state = model(piece, state)
        loss, with_loss = model.loss(piece, piece.flip(0), with_loss)
        logits.append(y)
        losses.append(loss)
    assert all(torch.equal(one, other) for one, other in zip(states.tensors(state), states.tensors(with_loss)))
    flat = [torch.cat(logits, 1), torch.cat(losses, 1), *states.tensors(state)]
    weights = torch.Generator().manual_seed(1)
    total = sum((torch.randn(t.shape, generator=weights, dtype=t.dtype) * t).sum() for t in flat)
    return flat, torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize(("pieces", "before"), [([3, 9, 0, 2, 1, 5], 3), ([1, 1, 4, 2, 9], 0)])
@pytest.mark.parametrize("variant", ["transformer", "same-length", "untied"])  # tests/contracts has the others
def test_any_cut_gives_the_whole(variant, pieces, before):
    torch.manual_seed(0)
    model, x, state = build(**VARIANTS[variant]), tokens(2, sum(pieces)), None
    if before:
        _, state = model(tokens(2, before))
        state = states.map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(), state)
    whole, cut = results(model, x, [sum(pieces)], state), results(model, x, pieces, state)
    for one, other in zip((*cut[0], *cut[1]), (*whole[0], *whole[1])):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


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


def vars_of(model):
    return {name: value for name, value in vars(model.config).items() if name != "vocab_size"}


def test_the_memory_matters_unless_there_is_none():
    x = tokens(2, 8)
    for mem_len in (0, 1, 6):
        model = build(mem_len=mem_len)
        carried, alone = model(x)[0][:, 4:], model(x[:, 4:])[0]
        assert torch.allclose(carried, alone, rtol=1e-10, atol=1e-12) == (mem_len == 0)


def test_other_lengths_with_the_same_weights():
    model, x = build(), tokens(2, 20)
    longer = model.with_lengths(segment_length=7, mem_len=9, same_length=True, clamp_len=5)
    assert [id(p) for p in longer.parameters()] == [id(p) for p in model.parameters()]
    lengths = {"segment_length": 7, "mem_len": 9, "same_length": True, "clamp_len": 5}
    fresh = build(**lengths)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(longer(x)[0], fresh(x)[0])
    assert longer.config == fresh.config
    # and the model itself stays as it was
    assert model.config.segment_length == model.attentions[0].window.segment_length == 4
    assert torch.equal(
        longer.with_lengths(segment_length=4, mem_len=6, same_length=False, clamp_len=None)(x)[0], model(x)[0]
    )


def test_only_lengths_can_be_changed():
    with pytest.raises(TypeError, match="lengths has n_layer; expected only segment_length, mem_len"):
        build().with_lengths(n_layer=3)
    with pytest.raises(ValueError, match="mem_len is -1"):
        build().with_lengths(mem_len=-1)


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


def test_states_are_float32_under_autocast():
    x = tokens(2, 11)
    for variant, logits in (("plain", torch.bfloat16), ("adaptive-divided", torch.float32)):
        model = build(**VARIANTS[variant]).float()
        with torch.autocast("cpu", torch.bfloat16):
            y, state = model(x, model(x)[1])
            losses, _ = model.loss(x, x)
        assert (y.dtype, losses.dtype) == (logits, torch.float32)
        assert {tensor.dtype for tensor in states.tensors(state)} == {torch.float32}
        torch.testing.assert_close(losses, model.loss(x, x)[0], rtol=0.1, atol=0.1)


@pytest.mark.parametrize("wrong", [-1, VOCABULARY])
def test_ids_outside_the_vocabulary_are_refused(model, wrong):
    x, bad = tokens(1, 2), torch.tensor([[0, wrong]])
    with pytest.raises(IndexError, match=f"tokens is a tensor with the id {wrong}; expected ids from 0 to 10"):
        model(bad)
    with pytest.raises(IndexError, match=f"targets is a tensor with the id {wrong}"):
        model.loss(x, bad)


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
