"""DeltaNet's layer against its equations, written out step by step with the papers' matrices."""

import pytest
import torch
from tests.mixers.stepwise import require_float32_states, require_padding_skipped
from torch import Tensor
from torch.nn import functional

from recurra.mixers.delta_net import DeltaNet, DeltaNetState

D_MODEL = 6
OPTIONS = {"n_heads": 2, "d_qk": 8, "d_v": 6}
NEGATIVE = [False, True]


def draw_state(layer: DeltaNet, batch: int = 2) -> DeltaNetState:
    return DeltaNetState(*(torch.randn_like(part.double()) for part in layer.initial_state(batch)))


def by_a_loop(layer: DeltaNet, x: Tensor, state: DeltaNetState) -> tuple[Tensor, DeltaNetState]:
    """S_t = S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T with columns; the convolution as a sum over its window."""
    heads, kernel = layer.n_heads, layer.convolution.weight[:, 0]
    s, window, outputs = state.h.mT, state.inputs, []
    for step in x.unbind(1):
        window = torch.cat([window, (step @ layer.qkv.weight.T)[:, None]], 1)
        mixed = torch.einsum("bkc,ck->bc", window, kernel)
        window = window[:, 1:]
        parts = (mixed * torch.sigmoid(mixed)).split([layer.d_qk, layer.d_qk, layer.d_v], -1)
        q, k, v = (part.unflatten(-1, (heads, -1))[..., None] for part in parts)
        q, k = (part / (part.square().sum(-2, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        b = torch.sigmoid(step @ layer.rate_projection.weight.T)[..., None, None] * layer.largest_rate
        s = s @ (torch.eye(k.shape[-2]).double() - b * k @ k.mT) + b * v @ k.mT
        y = (s @ q)[..., 0] / q.shape[-2] ** 0.5
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight
        outputs.append(y.flatten(1) @ layer.output_projection.weight.T)
    return torch.stack(outputs, 1), DeltaNetState(s.mT, window)


@pytest.mark.parametrize("negative", NEGATIVE)
@pytest.mark.parametrize("length", [1, 3, 70])
def test_it_is_its_recurrence_outputs_state_and_gradients(length, negative):
    layer = DeltaNet(D_MODEL, **OPTIONS, negative_eigenvalues=negative).double()
    torch.nn.init.normal_(layer.norm.weight)
    x = torch.randn(2, length, D_MODEL, dtype=torch.float64, requires_grad=True)
    state = DeltaNetState(*(part.requires_grad_() for part in draw_state(layer)))
    results = []
    for y, last in (layer(x, state), by_a_loop(layer, x, state)):
        generator = torch.Generator().manual_seed(1)
        flat = [y, *last]
        weights = [torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in flat]
        loss = sum((w * part).sum() for w, part in zip(weights, flat))
        results.append([*flat, *torch.autograd.grad(loss, [x, *state, *layer.parameters()])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_it_starts_from_zeros():
    layer, x = DeltaNet(D_MODEL, **OPTIONS).double(), torch.randn(2, 6, D_MODEL, dtype=torch.float64)
    start = layer.initial_state(2)
    assert all(part.eq(0).all() for part in start)
    torch.testing.assert_close(layer(x)[0], by_a_loop(layer, x, start)[0], rtol=1e-9, atol=1e-10)


def with_rates(layer: DeltaNet, rates: Tensor) -> Tensor:
    """Draw inputs for which b is 0 or the largest rate, as `rates` (L) says: the first channel decides.

    Queries and keys come from the step alone and are the same; the second channel keeps them away from 0.
    """
    n = layer.d_qk
    with torch.no_grad():
        layer.rate_projection.weight.zero_()[:, 0] = 100
        layer.qkv.weight[n : 2 * n, 1] = 3
        layer.qkv.weight[:n] = layer.qkv.weight[n : 2 * n]
        layer.convolution.weight[: 2 * n] = torch.tensor([0.0, 0.0, 0.0, 1.0])
    x = torch.randn(2, len(rates), D_MODEL, dtype=torch.float64)
    x[..., 0] = torch.where(rates.bool(), 1.0, -1.0)
    x[..., 1] = 1
    return x


def test_a_rate_of_zero_keeps_the_state_and_one_replaces_the_keys_value():
    layer = DeltaNet(D_MODEL, **OPTIONS).double()
    state = draw_state(layer)
    assert torch.allclose(layer(with_rates(layer, torch.zeros(9)), state)[1].h, state.h)
    x, start = with_rates(layer, torch.ones(9)), DeltaNetState(state.h, torch.zeros_like(state.inputs))
    values = functional.silu(layer.convolution(layer.qkv(x))[0])[..., 16:].unflatten(-1, (2, 3))
    # q = k, so the output is the value that the key has
    expected = layer.output_projection(layer.norm(values / 2).flatten(-2))  # sqrt(d_k) = 2
    torch.testing.assert_close(layer(x, start)[0], expected, rtol=1e-4, atol=1e-4)


def test_with_negative_eigenvalues_it_counts_modulo_2():
    """With values of 0 a step of b = 2 is -1 along its key, and the sign of the state is a parity."""
    layer = DeltaNet(D_MODEL, n_heads=1, d_qk=1, d_v=1, negative_eigenvalues=True).double()
    with torch.no_grad():
        layer.qkv.weight[2] = 0
    bits = torch.randint(2, (120,))
    state = DeltaNetState(torch.ones(2, 1, 1, 1).double(), torch.zeros(2, 3, 3).double())
    for n in (1, 7, 120):
        _, last = layer(with_rates(layer, bits[:n]), state)
        assert torch.equal(last.h.sign(), torch.full_like(last.h, (-1) ** int(bits[:n].sum())))
        assert last.h.abs().min() > 0.999


def test_padding_neither_writes_nor_forgets():
    require_padding_skipped(DeltaNet(D_MODEL, **OPTIONS).double(), D_MODEL)


def test_the_state_is_float32_in_bfloat16_and_under_autocast():
    require_float32_states(lambda: DeltaNet(D_MODEL, **OPTIONS), D_MODEL, tolerance=0.1)


def test_weights_are_the_published_ones_and_nothing_has_a_bias():
    assert {name: tuple(p.shape) for name, p in DeltaNet(8).named_parameters()} == {
        "qkv.weight": (24, 8),
        "convolution.weight": (24, 1, 4),
        "rate_projection.weight": (4, 8),
        "norm.weight": (2,),
        "output_projection.weight": (8, 8),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_heads": 3, "d_v": 4}, "n_heads is 3; expected a divisor of d_v = 4"),
        ({"n_heads": 0}, "n_heads is 0; expected at least 1"),
        ({"d_qk": 0, "n_heads": 1}, "d_qk is 0; expected at least 1"),
        ({"kernel_size": 0, "n_heads": 1}, "kernel_size is 0; expected at least 1"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DeltaNet(D_MODEL, **options)
