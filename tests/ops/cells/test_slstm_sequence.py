"""slstm_sequence beyond what tests/layers/test_layer_kernels.py compares with the reference."""

import pytest
import torch

from recurra.ops.cells.slstm import SLSTMParts, slstm_sequence, slstm_sequence_reference

TOLERANCES = {torch.float64: 1e-12, torch.float32: 4e-6}
PARTS = ("y", "c", "n", "h")


def draw(batch, length, heads, size, dtype=torch.float64, starts=False):
    """The arguments of a sequence, whose state is that of a stream's start or any other."""
    projected = 2 * torch.randn(batch, length, 4, heads, size, dtype=dtype)
    weights = torch.randn(heads, size, 4 * size, dtype=dtype) * size**-0.5
    c, n, m, h = torch.randn(4, batch, heads, size, dtype=dtype)
    state = [torch.zeros_like(c)] * 4 if starts else [c, 1 + n.abs(), m, h]
    return [x.clone().requires_grad_() for x in (projected, weights, *state)]


def call(function, inputs):
    y, last = function(*inputs[:2], SLSTMParts(*inputs[2:]))
    return {"y": y, **last._asdict()}


def loss_of(results):
    return sum((torch.sin(torch.arange(x.numel())).view_as(x) * x).sum() for n, x in results.items() if n in PARTS)


def require_near(found, expected, tolerance):
    scale = expected.detach().abs().max().item() if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * max(scale, 1.0))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_stream_starts_with_its_first_input_gate(dtype):
    inputs = draw(2, 5, 2, 3, dtype, starts=True)
    with torch.no_grad():
        inputs[0][:, 0, 1] = 1000 * torch.randn(2, 2, 3)
        inputs[4] += 5.0  # of no effect, as n is 0
    results = [call(function, inputs) for function in (slstm_sequence, slstm_sequence_reference)]
    found, expected = (torch.autograd.grad(loss_of(x), inputs) for x in results)
    for one, other in zip((*results[0].values(), *found), (*results[1].values(), *expected)):
        assert one.isfinite().all()
        require_near(one, other, 4 * TOLERANCES[dtype])
    assert found[4].eq(0).all()


def test_outputs_may_be_changed_in_place():
    inputs = draw(1, 2, 2, 4, torch.float32)
    results = call(slstm_sequence, inputs)
    total = sum(results[name].sum() for name in PARTS)
    kept = torch.autograd.grad(total, inputs, retain_graph=True)
    with torch.no_grad():
        for result in results.values():
            result.zero_()
    for gradient, before in zip(torch.autograd.grad(total, inputs), kept):
        assert torch.equal(gradient, before)


def test_gradients_are_in_float32_under_autocast():
    inputs = draw(2, 4, 2, 3, torch.float32)
    expected = torch.autograd.grad(loss_of(call(slstm_sequence, inputs)), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(loss_of(call(slstm_sequence, inputs)), inputs)
        again = torch.autograd.grad(loss_of(call(slstm_sequence, inputs)), inputs, create_graph=True)
    for one, twice, other in zip(found, again, expected):
        assert torch.equal(one, other)
        require_near(twice, other, 2e-5)


@pytest.mark.parametrize(("place", "name"), enumerate(["projected", "weights", *(f"state.{part}" for part in "cnmh")]))
def test_tensors_of_other_sizes_are_refused(place, name, unchecked):
    inputs = draw(2, 3, 2, 4)
    inputs[place] = inputs[place].unsqueeze(0) if place == 0 else torch.cat([inputs[place], inputs[place][..., :1]], -1)
    with pytest.raises(ValueError, match=rf"{name} is float64 \(.*\) on cpu; expected"):
        call(slstm_sequence, inputs)
