"""The kernel of the delta rule: the numbers of the reference for every size and layout, and nothing beyond."""

import pytest
import torch

from recurra import delta_rule

SIZES = [(1, 1), (3, 15), (1, 16), (5, 17), (64, 64), (2, 65), (7, 100), (16, 200)]  # vectors of 16, blocks of 64


def assert_near(actual, expected):
    for mine, right in zip(actual, expected, strict=True):
        assert mine.dtype == torch.float32
        assert (mine.double() - right).abs().max() <= 2e-6 * right.abs().max()


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("d_qk", "d_v"), SIZES)
@pytest.mark.parametrize("length", [1, 2, 17])
def test_it_is_the_reference(draw, length, d_qk, d_v):
    inputs = draw(length, 3, d_qk, d_v)
    single = inputs.to(torch.float32)
    kept = [x.clone() for x in single]
    actual = delta_rule(*single, mode="fused")
    assert_near(actual, delta_rule(*inputs, mode="recurrent"))
    assert all(map(torch.equal, single, kept))
    assert actual[1].data_ptr() != single.state.data_ptr()


def test_tensors_in_any_layout(draw):
    inputs = draw(6, 2, 5, 20).to(torch.float32)
    expected = delta_rule(*inputs, mode="fused")
    turned = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in inputs]
    apart = [torch.stack([x, x], -1)[..., 0] for x in inputs]
    for other in (turned, apart):
        assert not other[0].is_contiguous()
        assert all(map(torch.equal, delta_rule(*other, mode="fused"), expected))
    one = inputs.b[:1, :1].expand_as(inputs.b)
    actual = delta_rule(*inputs._replace(b=one), mode="fused")
    assert all(map(torch.equal, actual, delta_rule(*inputs._replace(b=one.contiguous()), mode="fused")))


def test_a_stream_has_the_same_bits_wherever_it_is_cut(draw):
    inputs = draw(40, 2, 9, 70).to(torch.float32)
    whole = delta_rule(*inputs, mode="fused")
    outputs, state = [], inputs.state
    for piece in zip(*(x.split([1, 20, 3, 16], 1) for x in inputs[:5])):
        y, state = delta_rule(*piece, state, mode="fused")
        outputs.append(y)
    assert torch.equal(torch.cat(outputs, 1), whole[0])
    assert torch.equal(state, whole[1])


def test_what_it_does_not_take_is_refused_and_auto_goes_around_it(draw):
    inputs = draw(3).to(torch.float32)
    leaf = inputs._replace(v=inputs.v.clone().requires_grad_())
    refused = {
        "the kernel has no derivatives": leaf,
        "the kernel computes in float32, not in float64": inputs._replace(state=inputs.state.double()),
    }
    for obstacle, given in refused.items():
        with pytest.raises(ValueError, match=f"mode is 'fused'; expected 'auto' or another mode: {obstacle}"):
            delta_rule(*given, mode="fused")
        assert delta_rule(*given)[0].shape == inputs.v.shape
    with torch.no_grad():
        delta_rule(*leaf, mode="fused")
    with pytest.raises(ValueError, match="the kernel runs on the CPU, and the tensors are on meta"):
        delta_rule(*(x.to("meta") for x in inputs), mode="fused")
