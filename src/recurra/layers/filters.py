"""Long filters that a small network computes from the position (Hyena, Poli et al. 2023, arXiv 2302.10866)."""

import itertools
import math
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require_at_least
from recurra.ops.scan.convolution import transform_length

# pairs of positional features, hidden channels and layers, and where the frequency of the sines starts
_BANDS, _WIDTH, _DEPTH, _FREQUENCY = 16, 64, 3, 14.0
_SLOWEST, _FASTEST = math.log(100) / 1.5, math.log(100) / 0.3  # a filter falls to 1 % in 1.5 or 0.3 of its length
_SHIFT = 0.05  # what the window keeps of a filter's end

_LONG = 64
"""Shorter pieces are convolved directly: on one core with 64 channels and windows of 128 and 1024 steps, both ways took
about the same for 32 to 128 steps, and for 2048 steps the transform took a fifth to a half of the time."""


class ImplicitFilters(nn.Module):
    """filter_s,d = FFN(features of s)_d * (exp(-alpha_d s / (length - 1)) + shift), 0 <= s < length (section 3.3).

    These are the implicit kernels of Hyena (GateLoop section 3.1).
    The features are s / (length - 1) and sines and cosines of 16 frequencies. The network has three hidden layers of 64
    channels with activations sin(frequency * x) of a learned frequency a channel, which starts at 14 so that filters
    need not be smooth. The rates alpha are fixed; they run from a filter that falls to 1 % over 1.5 times its length to
    one that does over 0.3 of it. The shift, 0.05, leaves every filter its whole length.
    """

    needs_exact_weights = True
    """Fast sines of sums of fast sines: weights in bfloat16 make other filters."""

    def __init__(self, n_filters: int, length: int) -> None:
        super().__init__()
        require_at_least(1, n_filters=n_filters, length=length)
        self.n_filters, self.length = n_filters, length
        sizes = [2 * _BANDS + 1, *[_WIDTH] * _DEPTH]
        self.hidden = nn.ModuleList(nn.Linear(size, following) for size, following in itertools.pairwise(sizes))
        self.frequency = nn.Parameter(torch.full((_WIDTH,), _FREQUENCY))
        self.output = nn.Linear(_WIDTH, n_filters, bias=False)

    def forward(self) -> Float[Tensor, "length n_filters"]:
        """Compute the filters, in float32 or better.

        The network runs in float64: each of its layers of fast sines makes an error 14 times as large.
        """
        weight = self.output.weight
        with torch.autocast(weight.device.type, enabled=False):
            like: dict[str, Any] = {"dtype": torch.float64, "device": weight.device}
            step = torch.arange(self.length, **like)[:, None]
            share = step / max(self.length - 1, 1)
            # constants, which a graph in ONNX keeps in float64, unlike what it computes from numbers
            bands = [1e-4 + (_BANDS - 1 - 1e-4) * n / (_BANDS - 1) for n in range(_BANDS)]
            speeds = [2 * math.pi / self.length * band for band in bands]
            signed = torch.tensor([*speeds, *(-speed for speed in speeds)], **like)
            phases = torch.tensor([math.pi / 2] * _BANDS + [0.0] * _BANDS, **like)  # it has no cosine in float64 either
            z = torch.cat([share, torch.sin(step * signed + phases)], 1)
            for layer in self.hidden:
                z = torch.sin(self.frequency.double() * _linear(z, cast(nn.Linear, layer)))
            rates = torch.linspace(_SLOWEST, _FASTEST, self.n_filters, **like)
            filters = _linear(z, self.output) * (torch.exp(-rates * share) + _SHIFT)
            return filters.to(torch.promote_types(weight.dtype, torch.float32))


def _linear(x: Tensor, layer: nn.Linear) -> Tensor:
    return functional.linear(x, layer.weight.double(), None if layer.bias is None else layer.bias.double())


def convolve_window(
    x: Float[Tensor, "B L D"], filters: Float[Tensor, "K D"], past: Float[Tensor, "B K_1 D"]
) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B K_1 D"]]:
    """Compute y_t = sum_{s < K} filter_s x_{t-s}, continuing from the last K - 1 inputs.

    Pieces of at least `LONG` steps go through the fast Fourier transform, whose error is relative to the largest y;
    shorter ones, and traces for any length, are convolved directly. Both give the same result. Filters run from the
    step itself to the oldest, `past` from the oldest on. Returns y, and the last K - 1 inputs in memory of their own.
    """
    known = torch.cat([past, x], 1)
    is_long = not isinstance(x.shape[1], torch.SymInt) and x.shape[1] >= _LONG and x.numel() > 0
    with torch.autocast(x.device.type, enabled=False):
        y = (_by_transform if is_long else _directly)(known, filters, past.shape[1])
    return y, known[:, x.shape[1] :].clone()


def _by_transform(known: Tensor, filters: Tensor, n_before: int) -> Tensor:
    """A circular convolution: what wraps around reaches only the first K - 1 outputs, which nobody wants."""
    length = transform_length(known.shape[1])
    signal, kernel = known.transpose(1, 2).contiguous(), filters.t().contiguous()
    spectrum = torch.fft.rfft(signal, length) * torch.fft.rfft(kernel, length)
    return torch.fft.irfft(spectrum, length)[..., n_before : known.shape[1]].transpose(1, 2)


def _directly(known: Tensor, filters: Tensor, n_before: int) -> Tensor:
    if not isinstance(known.shape[1], torch.SymInt) and known.shape[1] == n_before + 1:
        return (known * filters.flip(0)).sum(1, keepdim=True)
    weights = filters.flip(0).t()[:, None]
    return functional.conv1d(known.transpose(1, 2), weights, groups=weights.shape[0]).transpose(1, 2)
