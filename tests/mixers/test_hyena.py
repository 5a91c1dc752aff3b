"""Hyena against its recurrence of gates and filters, written out step by step."""

import pytest
import torch
from tests.gradients import require_same_gradients

from recurra.layers.convolution import _LONG
from recurra.mixers.hyena import Hyena, HyenaState

D_MODEL = 3


def convolve(filters: torch.Tensor, seen: list[torch.Tensor], n_before: int) -> list[torch.Tensor]:
    """sum_s filter_s x_{t-s} for all t from `n_before` on."""
    return [
        sum(filters[s] * seen[t - s] for s in range(len(filters)) if t - s >= 0) for t in range(n_before, len(seen))
    ]


def by_a_loop(layer: Hyena, x: torch.Tensor, state: HyenaState) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, and the last inputs of the long convolutions."""
    projected = x @ layer.input_projection.weight.T + layer.input_projection.bias
    taps = layer.short_convolution.weight[:, 0].T.flip(0)
    short = convolve(taps, [*state.inputs.unbind(1), *projected.unbind(1)], state.inputs.shape[1])
    parts = [(step + layer.short_convolution.bias).split(D_MODEL, -1) for step in short]
    all_filters, n_before, pasts = layer.filters(), state.products.shape[2], []
    z = [part[-1] for part in parts]
    for n in range(layer.order - 1):
        products = [part[n] * step for part, step in zip(parts, z)]
        seen = [*state.products[:, n].unbind(1), *products]
        filters = all_filters[:, n * D_MODEL : (n + 1) * D_MODEL]
        z = [y + layer.skips[n] * p for y, p in zip(convolve(filters, seen, n_before), products)]
        pasts.append(torch.stack(seen[len(seen) - n_before :], 1) if n_before else state.products[:, n])
    y = torch.stack([part[-2] * step for part, step in zip(parts, z)], 1)
    return layer.output_projection(y), torch.stack(pasts, 1)


@pytest.mark.parametrize("length", [7, _LONG + 3])  # convolved directly, and by the fast Fourier transform
@pytest.mark.parametrize(
    "options", [{"window": 5}, {"window": 9, "order": 4}, {"window": 1, "kernel_size": 1}, {"window": 50}], ids=str
)
def test_outputs_state_and_gradients_are_those_of_the_loop(options, length):
    layer = Hyena(D_MODEL, **options).double()
    x = torch.randn(2, length, D_MODEL, dtype=torch.float64, requires_grad=True)
    start = HyenaState(*(torch.randn_like(tensor).double().requires_grad_() for tensor in layer.initial_state(2)))
    y, state = layer(x, start)
    leaves = [x, *start, *layer.parameters()]
    require_same_gradients((y, state.products), by_a_loop(layer, x, start), leaves, 1e-10)
