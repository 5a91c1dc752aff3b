"""The pre-norm Transformer-XL: memories before their norm, and gradients from them, against a plain recomputation."""

import math

import pytest
import torch
from tests.gradients import require_same_gradients
from torch.nn import functional

from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig

VOCABULARY, D_MODEL, HEADS, D_HEAD, SEGMENT, MEMORY = 7, 6, 2, 3, 3, 4


@pytest.fixture
def model() -> TransformerXL:
    config = TransformerXLConfig(
        vocab_size=VOCABULARY, n_layer=2, d_model=D_MODEL, n_heads=HEADS, d_channel_mixing=8, norm="pre", dropout=0.0,
        segment_length=SEGMENT, mem_len=MEMORY, share_biases=False,
    )  # fmt: skip
    model = TransformerXL(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def wave(distance):
    """The frequencies are float32 numbers, as in published weights."""
    rates = 1.0 / 10000.0 ** (torch.arange(0.0, D_MODEL, 2.0) / D_MODEL)
    return torch.cat([(distance * rates.double()).sin(), (distance * rates.double()).cos()])


def attend(attention, seen, i):
    """What step i of the normalised steps sees of those before it and itself, pair by pair."""
    heads = []
    for head in range(HEADS):
        rows = slice(head * D_HEAD, (head + 1) * D_HEAD)
        keys, values = attention.keys_values.weight.chunk(2)
        query = attention.queries.weight[rows] @ seen[i]
        scores = [
            (query + attention.content_bias[head]) @ (keys[rows] @ seen[j])
            + (query + attention.position_bias[head]) @ (attention.position_keys.weight[rows] @ wave(i - j))
            for j in range(i + 1)
        ]
        shares = (torch.stack(scores) / math.sqrt(D_HEAD)).softmax(0)
        heads.append(sum(share * (values[rows] @ seen[j]) for j, share in enumerate(shares)))
    return attention.output_projection.weight @ torch.cat(heads)


def norm(layer, x):
    centred = x - x.mean()
    return centred / (centred.pow(2).mean() + 1e-5).sqrt() * layer.weight + layer.bias


def recomputed(model, tokens):
    """The body's outputs of one stream, step by step; memories are detached before their norm."""
    memories, outputs = [[] for _ in model.blocks], []
    for segment in tokens.split(SEGMENT):
        x = [model.embedding.tables[0][token] * math.sqrt(D_MODEL) for token in segment]
        for number, block in enumerate(model.blocks):
            memory = memories[number]
            memories[number] = (memory + [h.detach() for h in x])[-MEMORY:]
            seen = [norm(block.norm_attention, h) for h in memory + x]
            x = [h + attend(block.attention, seen, len(memory) + i) for i, h in enumerate(x)]
            first, second = block.feed_forward[0], block.feed_forward[3]
            inner = [functional.relu(first(norm(block.norm_feed_forward, h))) for h in x]
            x = [h + second(part) for h, part in zip(x, inner)]
        outputs += x
    return torch.stack(outputs)


@pytest.mark.parametrize("pieces", [[8], [1, 4, 3]])
def test_outputs_and_gradients_are_the_published_ones(model, pieces):
    tokens, state, found = torch.randint(VOCABULARY, (8,)), None, []
    for piece in tokens[None].split(pieces, 1):
        hidden, state = model.hidden(piece, state)
        found.append(hidden[0])
    require_same_gradients(torch.cat(found), recomputed(model, tokens), [*model.blocks.parameters()], 1e-10)


def test_the_norm_gets_gradients_from_the_memory(model):
    """The memory's part of its gradient: zero if memories were normalised when they were kept."""
    tokens = torch.randint(VOCABULARY, (1, SEGMENT))
    with torch.no_grad():
        _, state = model(tokens)
    attention, norm_attention = model.blocks[0].attention, model.blocks[0].norm_attention
    x = torch.zeros(1, 1, D_MODEL, dtype=torch.float64)  # its own norm is the bias: no gradient to the weight
    attention(x, state.layers[0], norm=norm_attention)[0].sum().backward()
    assert norm_attention.weight.grad.abs().sum() > 1e-3
