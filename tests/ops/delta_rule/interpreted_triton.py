"""The Triton kernels of the delta rule beside "recurrent". tests/test_triton.py runs this file."""

from dataclasses import replace

import pytest
import torch
from tests.gradients import differentiate, require_near
from tests.ops.delta_rule.conftest import draw_inputs
from tests.quick_interpreter import DEVICE, INTERPRETED, NUMBER, TOLERANCE, sampled

from recurra import delta_rule
from recurra.ops._toolkit.triton import default_tiles
from recurra.ops.delta_rule import _triton as kernels
from recurra.ops.delta_rule import _triton_chunk as chunk_kernels
from recurra.ops.delta_rule import operator
from recurra.ops.gate_loop import _triton_chunk as linear_kernels

NAMES = ("y", "last state", "dq", "dk", "dv", "da", "db", "dstate")
# length, heads, d_qk, d_v, batch: chunks of 4 steps and tiles of 1 to 8 columns, on a card of 32 and up to 32
# and whether there is a decay for each key channel
SIZES = [(2, 2, 3, 5, 2), (1, 1, 1, 1, 1), (4, 1, 9, 5, 1), (6, 1, 2, 11, 1), (9, 2, 3, 5, 2), (37, 1, 13, 20, 1)]
SIZES += [(9, 1, 3, 5, 1, True), (6, 1, 9, 5, 1, True), (9, 2, 3, 5, 2, True), (37, 1, 13, 20, 1, True)]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(operator, "_EVERY", 4)
        monkeypatch.setattr(kernels, "_TILE", 16)
        monkeypatch.setattr(chunk_kernels, "_T", 4)
        tiles = replace(default_tiles("chunk", False), block=4, span=8)
        monkeypatch.setattr(linear_kernels, "tiles_for", lambda *_: tiles)


def draw(*sizes, number=NUMBER):
    return [x.to(DEVICE, number) for x in draw_inputs(*sizes)]


def by_kernels(*inputs):
    return delta_rule(*inputs, backend="triton")


def in_chunks(*inputs):
    """Past the front door, which refuses float64."""
    q, k, v, a, b, state = inputs
    return operator.chunk_by_kernels(q, k, v, a if a.dim() == 4 else a[..., None], b[..., None], state)


def by_steps(*inputs):
    return delta_rule(*inputs, mode="recurrent")


WAYS = pytest.mark.parametrize("way", [by_kernels, in_chunks])


def assert_near(actual, expected, tolerance=TOLERANCE):
    require_near(actual, expected, tolerance, NAMES)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("sizes", sampled([(s,) for s in SIZES], lambda sizes: sizes[0] * sizes[1] < 18), ids=str)
@WAYS
def test_outputs_and_gradients(way, sizes):
    tensors = draw(*sizes)
    assert_near(differentiate(way, tensors), differentiate(by_steps, tensors))


@pytest.mark.parametrize("chosen", [0, 1])
@WAYS
def test_either_output_alone_sends_its_gradient_back(way, chosen):
    tensors = draw(3, 1, 2, 3, 1)
    assert_near(differentiate(way, tensors, [chosen]), differentiate(by_steps, tensors, [chosen]))


@pytest.mark.parametrize("per_channel", [False, True])
@WAYS
def test_decays_of_nothing_and_all(way, per_channel):
    """A decay of 0 has a gradient too."""
    q, k, v, a, b, state = draw(7, 1, 2, 3, 1, per_channel)
    a[:, ::2], a[:, -1] = 1.0, 0.0
    expected = differentiate(by_steps, [q, k, v, a, b, state])
    assert expected[5][:, -1].abs().min() > 0
    assert_near(differentiate(way, [q, k, v, a, b, state]), expected)


def test_an_infinity_is_no_nan_beside_the_padding():
    q, k, v, a, b, state = draw(4, 1, 3, 5, 1)
    q, k, v[0, 3, 0, 1] = q.abs(), k.abs(), torch.inf
    found, expected = by_kernels(q, k, v, a, b, state), by_steps(q, k, v, a, b, state)
    assert expected[0].isinf().sum() == 1
    for mine, right in zip(found, expected):
        torch.testing.assert_close(mine, right, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_front_door(monkeypatch):
    """By name it runs the kernels or says why not, any strides come in, and "auto" takes them only on a card."""
    launched, original = [], kernels.forward_into
    monkeypatch.setattr(kernels, "forward_into", lambda *given: launched.append(1) or original(*given))
    tensors = draw(5, 2, 3, 4, 1, number=torch.float32)
    strided = [t.mT.contiguous().mT for t in tensors]
    for mine, right in zip(by_kernels(*strided), by_steps(*(t.double() for t in tensors))):
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-5)
    delta_rule(*tensors)
    assert len(launched) == (1 if INTERPRETED else 2)
    with pytest.raises(
        RuntimeError, match=r"backend is 'triton'; expected .* for mode 'recurrent', which is plain torch"
    ):
        delta_rule(*tensors, mode="recurrent", backend="triton")
    for mine, right in zip(delta_rule(*tensors, mode="chunk", backend="triton"), by_steps(*tensors)):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"backend is 'triton'; expected .* heads of up to 128 channels .*, not 129"):
        delta_rule(*draw(1, 1, 129, 1, 1, number=torch.float32), mode="chunk", backend="triton")
    with pytest.raises(ValueError, match=r"backend is 'triton'; expected .* up to 256 key channels a head, not 257"):
        by_kernels(*draw(1, 1, 257, 1, 1))


def test_auto_on_a_card_takes_chunks_for_more_than_64_key_channels():
    def chosen(d, length=5):
        return operator._choose_mode("auto", "triton", False, *torch.empty(2, 1, length, 1, d))

    assert [chosen(64), chosen(65), chosen(128)] == ["fused", operator._BY_KERNELS, operator._BY_KERNELS]
    assert [chosen(129), chosen(65, 4)] == ["chunk", "recurrent"]


def test_the_operators():
    q, k, v, a, b, state = draw(5, 1, 3, 2, 1)
    tensors = q, k, v, a[..., None], b[..., None], state
    torch.library.opcheck(torch.ops.recurra.delta_rule_fused.default, (*tensors, True, "triton"))
    checks = "test_schema", "test_faketensor"
    torch.library.opcheck(torch.ops.recurra.delta_rule_chunk.default, tensors, test_utils=checks)
    y, last, u = torch.ops.recurra.delta_rule_chunk(*tensors)
    for gradients in ((y, last), (None, last)):
        given = (*gradients, *tensors, u)
        torch.library.opcheck(torch.ops.recurra.delta_rule_chunk_backward.default, given, test_utils=checks)
    y, last, u, kept = torch.ops.recurra.delta_rule_fused(*tensors, True, "triton")
    for gradients in ((y, last), (None, last)):
        given = (*gradients, *tensors, u, kept, "triton")
        torch.library.opcheck(torch.ops.recurra.delta_rule_fused_backward.default, given, test_utils=checks)
