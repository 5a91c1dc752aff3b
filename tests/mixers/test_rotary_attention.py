"""Rotary attention: equal to the sum that its docstring says, over a window, however the stream is cut."""

import math

import pytest
import torch

from recurra.mixers.registry import create_mixer
from recurra.mixers.rotary_attention import RotaryAttention, RotaryAttentionState

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def make(**options):
    torch.manual_seed(0)
    return create_mixer("rotary-attention", 12, **options).double()


def by_the_sum(layer, x):
    """Step by step and head by head, with complex numbers in the place of rotations."""
    n_heads, groups, d_head = layer.n_heads, layer.n_kv_heads, layer.output_projection.in_features // layer.n_heads
    sizes = [n_heads * d_head, groups * d_head, groups * d_head]
    q, k, v = (part.unflatten(-1, (-1, d_head)) for part in layer.qkv(x).split(sizes, -1))
    k, v = (part[:, :, [head * groups // n_heads for head in range(n_heads)]] for part in (k, v))
    q, k = (torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) for part in (q, k))
    theta = 10000.0 ** (-torch.arange(0, layer.n_rotated, 2, dtype=torch.float64) / layer.n_rotated)
    theta = torch.cat([theta, torch.zeros(d_head // 2 - len(theta), dtype=torch.float64)])  # the rest stands still
    y = torch.zeros_like(v)
    for n in range(x.shape[1]):
        first = 0 if layer.window is None else max(0, n - layer.window + 1)
        turned = [k[:, m] * torch.polar(torch.ones_like(theta), -theta * (n - m)) for m in range(first, n + 1)]
        scores = torch.stack([(q[:, n] * key.conj()).real.sum(-1) for key in turned], -1) / math.sqrt(d_head)
        y[:, n] = torch.einsum("bhm,bmhd->bhd", scores.softmax(-1), v[:, first : n + 1])
    return layer.output_projection(y.flatten(2))


@pytest.mark.parametrize("window", [1, 3, 7, 64, None])
def test_it_is_the_sum(window):
    layer, x = make(n_heads=3, window=window), torch.randn(2, 17, 12, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], by_the_sum(layer, x), **CLOSE)


@pytest.mark.parametrize(
    "options",
    [
        {"n_kv_heads": 1},
        {"n_kv_heads": 2},
        {"d_head": 8, "rotated_share": 0.5},
        {"n_kv_heads": 1, "d_head": 10, "rotated_share": 0.4, "output_bias": True},
        {"n_kv_heads": 2, "rotated_share": 0.0},
    ],
    ids=str,
)
def test_it_is_the_sum_with_shared_keys_and_partial_rotation(options):
    layer, x = make(n_heads=4 if "d_head" in options else 2, window=5, **options), torch.randn(2, 9, 12).double()
    torch.testing.assert_close(layer(x)[0], by_the_sum(layer, x), **CLOSE)
    head, tail = x.split([4, 5], 1)
    y, state = layer(head)
    assert state.keys.shape == (2, 4, layer.n_kv_heads, layer.d_head)
    torch.testing.assert_close(torch.cat([y, layer(tail, state)[0]], 1), layer(x)[0], **CLOSE)


@pytest.mark.parametrize("window", [1, 4, None])
def test_gradients_are_those_of_the_sum(window):
    layer = make(n_heads=2, window=window)
    x = torch.randn(2, 9, 12, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 9, 12, dtype=torch.float64)
    leaves = [x, *layer.parameters()]
    found = torch.autograd.grad((layer(x)[0] * weights).sum(), leaves)
    expected = torch.autograd.grad((by_the_sum(layer, x) * weights).sum(), leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("pieces", [[1] * 17, [5, 12], [11, 1, 5], [0, 17]])
def test_cuts_do_not_matter_and_the_state_is_bounded(pieces):
    layer, x = make(n_heads=2, window=4), torch.randn(2, 17, 12, dtype=torch.float64)
    outputs, state = [], None
    for piece in x.split(pieces, 1):
        y, state = layer(piece, state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), layer(x)[0], **CLOSE)
    assert state.keys.shape == (2, 3, 2, 6)


def test_the_state_is_float32_for_bfloat16():
    _, state = make(n_heads=2).bfloat16()(torch.randn(1, 3, 12, dtype=torch.bfloat16))
    assert isinstance(state, RotaryAttentionState)
    assert {part.dtype for part in state} == {torch.float32}


def test_dropout_acts_in_training_alone():
    layer, x = make(n_heads=2, dropout=0.5), torch.randn(1, 8, 12, dtype=torch.float64)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


def test_bad_options_and_states_are_refused():
    with pytest.raises(ValueError, match="rotated channels a head is 3; expected an even number"):
        RotaryAttention(12, n_heads=4)
    with pytest.raises(ValueError, match="n_kv_heads is 3; expected a divisor of n_heads = 4"):
        RotaryAttention(16, n_heads=4, n_kv_heads=3)
    with pytest.raises(ValueError, match="rotated channels a head is 0; expected an even number"):
        RotaryAttention(16, n_heads=4, rotated_share=0.1)
    with pytest.raises(ValueError, match="window is 0"):
        RotaryAttention(12, n_heads=2, window=0)
    x = torch.randn(1, 9, 12, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"state\.keys is .*\(1, 8, 2, 6\) on cpu; expected .*p in 0\.\.3"):
        make(n_heads=2, window=4)(x, make(n_heads=2, window=9)(x)[1])
