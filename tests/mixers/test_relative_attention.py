"""Relative attention against its equation, one pair of steps at a time."""

import math

import pytest
import torch

from recurra.mixers.relative_attention import RelativeAttention

D_MODEL = 8
WINDOWS = [
    {"segment_length": 4, "mem_len": 6},
    {"segment_length": 5, "mem_len": 3},
    {"segment_length": 3, "mem_len": 0},
    {"segment_length": 4, "mem_len": 6, "same_length": True},
    {"segment_length": 5, "mem_len": 3, "same_length": True, "clamp_len": 2},
    {"segment_length": 1, "mem_len": 2},
    {"segment_length": 50, "mem_len": 9, "clamp_len": 4},
]


def build(**options) -> RelativeAttention:
    return RelativeAttention(D_MODEL, **{"n_heads": 2, **options}).double()


@pytest.fixture(params=WINDOWS, ids=str)
def attention(request) -> RelativeAttention:
    return build(**request.param)


def steps(batch: int, length: int) -> torch.Tensor:
    return torch.randn(batch, length, D_MODEL, dtype=torch.float64)


def encoded(distance: int) -> torch.Tensor:
    """The sinusoids of one distance; their frequencies are float32, as in the published weights."""
    rates = [float(torch.tensor(10000.0) ** -(2 * i / D_MODEL)) for i in range(D_MODEL // 2)]
    waves = [math.sin(distance * rate) for rate in rates] + [math.cos(distance * rate) for rate in rates]
    return torch.tensor(waves, dtype=torch.float64)


def by_the_equation(layer: RelativeAttention, x: torch.Tensor) -> torch.Tensor:
    """y_i of the whole stream: one row, one head, one pair (i, j) at a time; no memory, no state, only positions."""
    window, heads, d = layer.window, layer.n_heads, layer.d_head
    rows = []
    for row in x:
        outputs = []
        for i in range(len(row)):
            start = i // window.segment_length * window.segment_length
            parts = []
            for head in range(heads):
                own = slice(head * d, (head + 1) * d)
                values_of = slice((heads + head) * d, (heads + head + 1) * d)
                q = layer.queries.weight[own] @ row[i]
                scores, values = [], []
                for j in range(max(0, start - window.mem_len), i + 1):
                    if window.same_length and i - j >= window.mem_len:
                        continue
                    # what lies before the segment is a constant
                    seen = row[j] if j >= start else row[j].detach()
                    distance = i - j if window.clamp_len is None else min(i - j, window.clamp_len)
                    content = (q + layer.content_bias[head]) @ (layer.keys_values.weight[own] @ seen)
                    position = (q + layer.position_bias[head]) @ (layer.position_keys.weight[own] @ encoded(distance))
                    scores.append((content + position) / math.sqrt(d))
                    values.append(layer.keys_values.weight[values_of] @ seen)
                parts.append(torch.stack(scores).softmax(0) @ torch.stack(values))
            outputs.append(layer.output_projection.weight @ torch.cat(parts))
        rows.append(torch.stack(outputs))
    return torch.stack(rows)


def test_outputs_and_gradients_are_the_equation_s(attention):
    x = steps(2, 13).requires_grad_()
    y, _ = attention(x)
    expected = by_the_equation(attention, x)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-8)  # the frequencies differ in float32's last digit
    weights, leaves = torch.randn_like(y), [x, *attention.parameters()]
    pairs = zip(
        torch.autograd.grad((y * weights).sum(), leaves), torch.autograd.grad((expected * weights).sum(), leaves)
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_both_orders_of_the_position_product_agree():
    """One step of one stream and many of many choose different orders; both must be the same function."""
    attention, x = build(segment_length=40, mem_len=30), steps(64, 40)
    together, _ = attention(x)
    outputs, state = [], None
    for step in x[:1].split(1, 1):
        y, state = attention(step, state)
        outputs.append(y)
    alone = torch.cat(outputs, 1)
    torch.testing.assert_close(alone, together[:1], rtol=1e-10, atol=1e-12)


def test_a_shared_encoding_may_be_longer_than_needed():
    attention, x = build(segment_length=4, mem_len=6), steps(2, 9)
    longer = build(segment_length=30, mem_len=20)
    own, _ = attention(x)
    shared, _ = attention(x, encoding=longer.encode(steps(2, 50), longer.initial_state(2)))
    torch.testing.assert_close(shared, own, rtol=1e-12, atol=1e-14)
