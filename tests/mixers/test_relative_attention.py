"""Relative attention against its equation, one pair of steps at a time; its memory, its state, its cuts."""

import math

import pytest
import torch

from recurra import state as states
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


def in_pieces(attention, x, pieces, state=None):
    outputs = []
    for piece in x.split(pieces, 1):
        y, state = attention(piece, state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def results(attention, x, pieces, state):
    """Outputs, last state, and gradients of a loss over both for x, the weights and the entering state."""
    leaves = [x, *attention.parameters(), *states.tensors(state)]
    y, last = in_pieces(attention, x, pieces, state)
    flat = [y, *states.tensors(last)]
    weights = torch.Generator().manual_seed(1)
    loss = sum((torch.randn(t.shape, generator=weights, dtype=t.dtype) * t).sum() for t in flat)
    # parts of the state that no later step sees have no gradient: that counts as zero
    return flat, torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize(("pieces", "before"), [([3, 0, 11, 5, 1, 7, 2, 11, 4, 11], 5), ([1] * 12, 0)])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_any_cut_gives_the_whole(window, pieces, before):
    torch.manual_seed(0)
    attention, x = build(**window), steps(2, sum(pieces)).requires_grad_()
    state = None
    if before:
        with torch.no_grad():
            _, state = attention(steps(2, before))
        state = states.map_tensors(lambda tensor: tensor.clone().requires_grad_(), state)
    whole, cut = results(attention, x, [sum(pieces)], state), results(attention, x, pieces, state)
    for one, other in zip((*cut[0], *cut[1]), (*whole[0], *whole[1])):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_the_memory_is_what_entered_and_takes_no_gradient():
    attention, x = build(segment_length=4, mem_len=6), steps(2, 11).requires_grad_()
    _, state = attention(x)
    assert torch.equal(state.memory, x[:, -6:])
    assert not state.memory.requires_grad
    given = state._replace(memory=state.memory.clone().requires_grad_())
    assert not attention(steps(2, 1), given)[1].memory.requires_grad
    y, _ = attention(x)
    (gradient,) = torch.autograd.grad(y[:, 8:].square().sum(), x)
    assert not gradient[:, :8].any()
    assert gradient[:, 8:].abs().sum(-1).all()


def test_gradients_flow_within_a_segment_from_call_to_call():
    attention, x = build(segment_length=4, mem_len=6), steps(1, 8).requires_grad_()
    y, _ = in_pieces(attention, x, [6, 1, 1])
    (gradient,) = torch.autograd.grad(y[:, -1].square().sum(), x)
    assert gradient.abs().sum(-1)[0].ne(0).tolist() == [False] * 4 + [True] * 4


def test_without_memory_segments_are_alone():
    attention, x = build(segment_length=5, mem_len=0), steps(2, 17)
    alone = torch.cat([attention(segment)[0] for segment in x.split(5, 1)], 1)
    torch.testing.assert_close(attention(x)[0], alone, rtol=1e-12, atol=1e-14)


def test_the_state_never_exceeds_memory_and_segment(attention):
    window, channels = attention.window, 2 * attention.n_heads * attention.d_head
    limit = window.mem_len * D_MODEL + (window.mem_len + window.segment_length - 1) * channels
    state, x = None, steps(3, 40)
    for step in range(40):
        _, state = attention(x[:, step : step + 1], state)
        assert state.memory.shape[1] == min(step + 1, window.mem_len)
        assert state.segment.shape[1] == (step + 1) % window.segment_length
        assert states.n_bytes(state) <= 3 * 8 * limit


def test_both_orders_of_the_position_product_agree():
    """One step of one stream and many of many choose different orders; both must be the same function."""
    attention, x = build(segment_length=40, mem_len=30), steps(64, 40)
    together, _ = attention(x)
    alone, _ = in_pieces(attention, x[:1], [1] * 40)
    torch.testing.assert_close(alone, together[:1], rtol=1e-10, atol=1e-12)


def test_a_shared_encoding_may_be_longer_than_needed():
    attention, x = build(segment_length=4, mem_len=6), steps(2, 9)
    longer = build(segment_length=30, mem_len=20)
    own, _ = attention(x)
    shared, _ = attention(x, encoding=longer.encode(steps(2, 50), longer.initial_state(2)))
    torch.testing.assert_close(shared, own, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("before", "lengths", "message"),
    [
        (20, {"mem_len": 3}, r"state\.memory is float64 \(2, 6, 8\) on cpu; expected float64 \(2, m in 0\.\.3, 8\)"),
        (7, {"segment_length": 6}, r"state\.segment is float64 \(2, 7, 16\) on cpu; expected .* p in 0\.\.5, 16\)"),
    ],
)
def test_a_state_of_a_longer_window_is_refused(before, lengths, message):
    _, state = build(segment_length=8, mem_len=6)(steps(2, before))
    with pytest.raises(ValueError, match=message):
        build(**{"segment_length": 8, "mem_len": 6, **lengths})(steps(2, 1), state)
