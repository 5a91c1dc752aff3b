"""The Block-Recurrent Transformer against its layers in plain torch, block by block."""

import pytest
import torch
from tests.gradients import require_same_gradients
from tests.models.test_timesformer import moved
from torch import Tensor
from torch.nn import functional

from recurra.layers.positions import sinusoids
from recurra.models.block_recurrent_transformer import (
    BlockRecurrentTransformer,
    BlockRecurrentTransformerConfig,
    _BlockRecurrentAttention,
)

VOCABULARY, BLOCK, D_MODEL = 13, 4, 8


def small(**options) -> BlockRecurrentTransformerConfig:
    sizes = {"n_layer": 3, "d_model": D_MODEL, "n_heads": 2, "d_channel_mixing": 12, "dropout": 0.0, "n_states": 3}
    lengths = {"vocab_size": VOCABULARY, "segment_length": BLOCK}
    return BlockRecurrentTransformerConfig(**{**sizes, **lengths, "recurrent_layer": 2, **options})


def make(**options) -> BlockRecurrentTransformer:
    return moved(BlockRecurrentTransformer(small(**options)).double())


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length))


# --- the model in plain torch ---


def heads(flat: Tensor, attention) -> Tensor:
    return flat.unflatten(-1, (attention.n_heads, -1))


def among_tokens(attention, x: Tensor, block: int = BLOCK) -> Tensor:
    """Each token over the last `block` tokens, score by score (Transformer-XL, section 3.3); no gradient beyond."""
    w_k, w_v = attention.keys_values.weight.chunk(2)
    encoding = sinusoids(block, x.shape[-1], like=x).flip(0)  # of the distances 0, 1, ...
    mixed = []
    for i in range(x.shape[1]):
        q, scores, values = heads(x[:, i] @ attention.queries.weight.T, attention), [], []
        for j in range(max(0, i - block + 1), i + 1):
            other = x[:, j] if j // block == i // block else x[:, j].detach()
            k, v = heads(other @ w_k.T, attention), heads(other @ w_v.T, attention)
            r = heads(encoding[i - j] @ attention.position_keys.weight.T, attention)
            score = ((q + attention.content_bias) * k).sum(-1) + ((q + attention.position_bias) * r).sum(-1)
            scores.append(score / attention.d_head**0.5)
            values.append(v)
        weights = torch.stack(scores, -1).softmax(-1)  # (B, H, j)
        mixed.append((weights[..., None] * torch.stack(values, 2)).sum(2).flatten(1))
    return torch.stack(mixed, 1)


def after_attention(block, x: Tensor, attended: Tensor) -> Tensor:
    """What a post-norm block makes of its input and what its attention has mixed."""
    x = block.norm_attention(x + attended)
    up, down = block.feed_forward[0], block.feed_forward[3]
    hidden = torch.relu(functional.linear(x, up.weight, up.bias))
    return block.norm_feed_forward(x + functional.linear(hidden, down.weight, down.bias))


def over_all(attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention without positions: (B, n, C) from queries (B, n, C) and keys (B, m, C)."""
    q, k, v = (heads(part, attention) for part in (q, k, v))
    weights = (torch.einsum("bnhd,bmhd->bhnm", q, k) / attention.d_head**0.5).softmax(-1)
    return torch.einsum("bhnm,bmhd->bnhd", weights, v).flatten(2)


def next_vectors(gate, kind: str, c: Tensor, h: Tensor) -> Tensor:
    if kind == "fixed":
        g = torch.sigmoid(gate.bias)
        return g * c + (1 - g) * (h @ gate.candidate.weight.T + gate.candidate.bias)
    weights, biases = gate.candidate_and_gates.weight.chunk(3), gate.candidate_and_gates.bias.chunk(3)
    z, i, f = (h @ w.T + b for w, b in zip(weights, biases))
    return torch.sigmoid(f + 1) * c + torch.sigmoid(i - 1) * torch.tanh(z)


def with_vectors(attention: _BlockRecurrentAttention, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The recurrent layer over a whole stream: outputs, and the vectors behind the last whole block."""
    seen, c, outputs = among_tokens(attention, x), x.new_zeros(len(x), *attention.vector_ids.shape), []
    w_k, w_v = attention.keys_values.weight.chunk(2)
    for start in range(0, x.shape[1], BLOCK):
        block = x[:, start : start + BLOCK]
        norm = attention.norm_vectors
        e = functional.layer_norm(c, (D_MODEL,), norm.weight, norm.bias) + attention.vector_ids
        q_vectors, q_tokens, k, v = (e @ w.T for w in attention.of_vectors.weight.chunk(4))
        read = over_all(attention, block @ attention.vector_queries.weight.T, k, v)
        both = torch.cat([seen[:, start : start + BLOCK], read], -1)
        outputs.append(both @ attention.output_projection.weight.T)
        if block.shape[1] == BLOCK:
            of_block = over_all(attention, q_tokens, block @ w_k.T, block @ w_v.T)
            h = torch.cat([over_all(attention, q_vectors, k, v), of_block], -1)
            c = next_vectors(attention.gate, kind, c, h)
    return torch.cat(outputs, 1), c


def in_plain_torch(model, text: Tensor) -> tuple[Tensor, Tensor]:
    """The logits, and the state vectors of the second layer, the recurrent one."""
    table = model.embedding.tables[0]
    x = table[text] * D_MODEL**0.5
    for number, block in enumerate(model.blocks, 1):
        attention = block.attention
        if number == model.config.recurrent_layer:
            attended, vectors = with_vectors(attention, x, model.config.gate)
        else:
            attended = among_tokens(attention, x) @ attention.output_projection.weight.T
        x = after_attention(block, x, attended)
    return x @ table.T + model.head.biases[0], vectors


def vectors_of(state) -> Tensor:
    return next(layer.vectors for layer in state.layers if hasattr(layer, "vectors"))


@pytest.mark.parametrize(("gate", "length"), [("fixed", 11), ("lstm", 11), ("fixed", 3)])
def test_it_is_the_model_in_plain_torch_logits_vectors_and_gradients(gate, length):
    model, text = make(gate=gate), tokens(2, length)
    logits, state = model(text)
    expected, vectors = in_plain_torch(model, text)
    require_same_gradients((logits, vectors_of(state)), (expected, vectors), [*model.parameters()], 1e-10)


def test_the_recurrent_layer_is_the_tenth_of_twelve_or_the_one_that_is_named():
    unnamed = [small(n_layer=n_layer, recurrent_layer=None) for n_layer in (1, 2, 6, 12)]
    numbers = {config.n_layer: config.number_of_recurrent_layer for config in unnamed}
    assert numbers == {1: 1, 2: 2, 6: 5, 12: 10}
    for chosen in (1, 3):
        model = make(recurrent_layer=chosen)
        is_recurrent = [isinstance(attention, _BlockRecurrentAttention) for attention in model.attentions]
        assert is_recurrent == [number == chosen for number in (1, 2, 3)]
        assert model(tokens(1, 9))[0].isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate": "gru"}, "gate is 'gru'; expected one of fixed, lstm"),
        ({"recurrent_layer": 4}, "recurrent_layer is 4; expected one of the 3 layers, from 1"),
    ],
)
def test_impossible_shapes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)
