"""Convolutions along time, one filter a channel: short ones, long filters that a small network computes (Hyena), and
RWKV's token shift.
"""

import itertools
import math
from typing import Any, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import kind_of, require_at_least, sentence
from recurra.layers.feed_forward import LinearWeights
from recurra.layers.norms import NUMBERS, at_least_float32
from recurra.lengths import mask_fill
from recurra.ops._operator import (
    HALF,
    Differentiable,
    OneNode,
    addresses,
    describe,
    is_any_length,
    last_dim_contiguous,
    needs_gradient,
    numba_kernels_take,
    require_layouts,
    span_of_job,
    without_autocast,
)
from recurra.ops.scan.convolution import transform_length

# pairs of positional features, hidden channels and layers, and where the frequency of the sines starts
_BANDS, _WIDTH, _DEPTH, _FREQUENCY = 16, 64, 3, 14.0
_SLOWEST, _FASTEST = math.log(100) / 1.5, math.log(100) / 0.3  # a filter falls to 1 % in 1.5 or 0.3 of its length
_SHIFT = 0.05  # what the window keeps of a filter's end

_DIRECT = 128
"""Steps of a block that `causal_convolution` convolves directly."""
_LONG = 64
"""Shorter pieces are convolved directly: on one core with 64 channels and windows of 128 and 1024 steps, both ways took
about the same for 32 to 128 steps, and for 2048 steps the transform took a fifth to a half of the time."""


class ImplicitFilters(nn.Module):
    """filter_s,d = FFN(features of s)_d * (exp(-alpha_d s / (length - 1)) + shift), 0 <= s < length (section 3.3).

    These are the implicit kernels of Hyena (Poli et al. 2023, arXiv 2302.10866; GateLoop section 3.1). The features are
    s / (length - 1) and sines and cosines of 16 frequencies. The network has three hidden layers of 64 channels with
    activations sin(frequency * x) of a learned frequency a channel, which starts at 14 so that filters need not be
    smooth. The rates alpha are fixed; they run from a filter that falls to 1 % over 1.5 times its length to one that
    does over 0.3 of it. The shift, 0.05, leaves every filter its whole length.
    """

    needs_exact_weights = True
    """Fast sines of sums of fast sines: weights in bfloat16 make other filters."""

    def __init__(self, n_filters: int, length: int) -> None:
        super().__init__()
        require_at_least(1, n_filters=n_filters, length=length)
        self.n_filters, self.length = n_filters, length
        sizes = [2 * _BANDS + 1, *[_WIDTH] * _DEPTH]
        self.hidden = nn.ModuleList(LinearWeights(size, following) for size, following in itertools.pairwise(sizes))
        self.frequency = nn.Parameter(torch.full((_WIDTH,), _FREQUENCY))
        self.output = LinearWeights(_WIDTH, n_filters, bias=False)

    def forward(self) -> Float[Tensor, "length n_filters"]:
        """Compute the filters, in float32 or better.

        The network runs in float64: each of its layers of fast sines makes an error 14 times as large.
        """
        weight = self.output.weight
        with without_autocast(weight):
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
                z = torch.sin(self.frequency.double() * _linear(z, cast(LinearWeights, layer)))
            rates = torch.linspace(_SLOWEST, _FASTEST, self.n_filters, **like)
            filters = _linear(z, self.output) * (torch.exp(-rates * share) + _SHIFT)
            return filters.to(torch.promote_types(weight.dtype, torch.float32))


def _linear(x: Tensor, layer: LinearWeights) -> Tensor:
    return functional.linear(x, layer.weight.double(), None if layer.bias is None else layer.bias.double())


def convolve_window(
    x: Float[Tensor, "B L D"], filters: Float[Tensor, "K D"], past: Float[Tensor, "B K_1 D"]
) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B K_1 D"]]:
    """Compute y_t = sum_{s < K} filter_s x_{t-s}, continuing from the last K - 1 inputs.

    Pieces of at least `_LONG` steps go through `causal_convolution`; shorter ones, and traces for any length, are
    convolved directly. Both give the same result. Filters run from the step itself to the oldest, `past` from the
    oldest on. Returns y, and the last K - 1 inputs in memory of their own.
    """
    known = torch.cat([past, x], 1)
    if torch.compiler.is_dynamo_compiling() and is_any_length(x.shape[1]):
        return _any_window(x, filters, past), known[:, x.shape[1] :].clone()
    is_long = not isinstance(x.shape[1], torch.SymInt) and x.shape[1] >= _LONG and x.numel() > 0
    with without_autocast(x):
        if filters.shape[0] <= _LONG and is_long:
            y = shifted_products(x, past, filters.flip(0), None)
        elif is_long:
            y = causal_convolution(x, filters) + _after(past, filters, x.shape[1])
        else:
            y = _directly(known, filters)
    return y, known[:, x.shape[1] :].clone()


_any_window = OneNode(
    "convolve_window(Tensor x, Tensor filters, Tensor past) -> Tensor",
    lambda x, filters, past: convolve_window(x, filters, past)[0],
    lambda x, *_: x.new_empty(x.shape),
    n_inputs=3,
)


def causal_convolution(x: Float[Tensor, "B L D"], filters: Float[Tensor, "K D"]) -> Float[Tensor, "B L D"]:
    """Compute y_t = sum_{s < K, s <= t} filter_s x_{t-s}, in O(L log^2 min(K, L)).

    An input disturbs no output before it, not even by rounding, as it would in one Fourier transform over all of x:
    blocks of `_DIRECT` steps are convolved directly, and `_across` adds what earlier blocks send. B and L are at least
    1. Gradients are as causal in the other direction.
    """
    return _causal(x, filters)[0]


def _causal_reference(x: Tensor, filters: Tensor) -> tuple[Tensor]:
    batch, length, _ = x.shape
    blocks = functional.pad(x, (0, 0, 0, -length % _DIRECT)).unflatten(1, (-1, _DIRECT)).flatten(0, 1)
    first = filters[:_DIRECT]
    within = shifted_products(blocks, blocks.new_zeros(len(blocks), len(first) - 1, x.shape[2]), first.flip(0), None)
    return (within.unflatten(0, (batch, -1)).flatten(1, 2)[:, :length] + _across(x, filters),)


def _across(x: Tensor, filters: Tensor) -> Tensor:
    """Send the first half of x into the second by one transform, and each half likewise, down to blocks."""
    length, n_taps, half = x.shape[1], filters.shape[0], _DIRECT
    n_blocks = 1 << (-(-length // half) - 1).bit_length()
    signal, taps = functional.pad(x.transpose(1, 2), (0, n_blocks * half - length)), filters.t()
    y = torch.zeros_like(signal)
    while half < length:
        pairs = -(-(length - half) // (2 * half))
        first, second = (z[..., : 2 * half * pairs].unflatten(-1, (pairs, 2, half)) for z in (signal, y))
        reach = min(half, 1 << (n_taps - 1).bit_length())  # filters are too short for inputs and outputs beyond
        size = 2 * reach
        spectrum = torch.fft.rfft(first[..., 0, half - reach :], size) * torch.fft.rfft(taps[:, :size], size)[:, None]
        second[..., 1, :reach] += torch.fft.irfft(spectrum, size)[..., reach:]
        half *= 2
    return y[..., :length].transpose(1, 2)


def _causal_backward(gradients: tuple, saved: tuple, needs: tuple) -> tuple[Tensor | None, Tensor | None]:
    """The gradient of x is the same backwards in time; that of the filters is a correlation over all of it."""
    (given,), (x, filters) = gradients, saved
    d_x = d_filters = None
    if needs[0]:
        d_x = _causal_reference(given.flip(1), filters)[0].flip(1)
    if needs[1]:
        n_taps = min(len(filters), x.shape[1])
        size = transform_length(x.shape[1] + n_taps - 1)
        spectrum = (torch.fft.rfft(given, size, 1) * torch.fft.rfft(x, size, 1).conj()).sum(0)
        d_filters = torch.fft.irfft(spectrum, size, 0)[:n_taps]
        d_filters = functional.pad(d_filters, (0, 0, 0, len(filters) - n_taps))
    return d_x, d_filters


_causal = Differentiable(
    lambda _, x, filters: (_causal_reference(x, filters), (x, filters)),
    _causal_backward,
    n_inputs=2,
    reference=_causal_reference,
)


def _after(past: Tensor, filters: Tensor, length: int) -> Tensor:
    """What `length` steps have from the K - 1 inputs before them."""
    n_before = past.shape[1]
    size = transform_length(max(2 * n_before, 1))
    spectrum = torch.fft.rfft(past.transpose(1, 2), size) * torch.fft.rfft(filters.t(), size)
    y = torch.fft.irfft(spectrum, size)[..., n_before : n_before + length]
    return functional.pad(y, (0, length - y.shape[-1])).transpose(1, 2)


def _directly(known: Tensor, filters: Tensor) -> Tensor:
    if known.shape[1] == filters.shape[0]:
        return (known * filters.flip(0)).sum(1, keepdim=True)
    weights = filters.flip(0).t()[:, None]
    return functional.conv1d(known.transpose(1, 2), weights, groups=weights.shape[0]).transpose(1, 2)


def shifted_products(
    x: Float[Tensor, "B L D"],
    state: Float[Tensor, "B K_1 D"],
    weight: Float[Tensor, "K D"],
    bias: Float[Tensor, " D"] | None,
    silu: bool = False,
) -> Float[Tensor, "B L D"]:
    """Compute y_t = bias + sum_{k < K} weight_k x_{t - K + 1 + k}, with the inputs before x in `state`; or SiLU(y_t).

    x may also be bfloat16 where all else, and y, is float32. On a CPU a kernel does it in one walk, and another takes
    all gradients. It is the reference itself for other types and devices, for a single step without gradients, and
    under torch.compile, torch.func and forward derivatives.
    """
    _check(x, state, weight, bias)
    is_one_step = x.shape[1] == 1 and not needs_gradient(x, state, weight, bias)
    if is_one_step or not numba_kernels_take(x, *NUMBERS) or weight.dtype != torch.float32:
        return _shifted_products_reference(x, state, weight, bias, silu)
    return _shifted_products(x, state, weight, bias, silu, x.dtype)[0]


def _check(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.ndim != 3:
        raise ValueError(sentence("x", kind_of(x), "(B, L, D)"))
    (batch, _, row), kind = x.shape, (torch.float32 if x.dtype in HALF else x.dtype, x.device)
    n = weight.shape[0]
    require_layouts(*kind, weight=(weight, (n, row)), state=(state, (batch, n - 1, row)), bias=(bias, (row,)))


def _shifted_products_reference(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool = False, _: torch.dtype | None = None
) -> Tensor:
    """Compute the same in plain operators."""
    known, length = torch.cat([state, at_least_float32(x)], 1), x.shape[1]
    weight = weight.contiguous()  # the products below read rows of D numbers
    first, *shifted = (known[:, k : k + length] for k in range(weight.shape[0]))
    y = first * weight[0] if bias is None else torch.addcmul(bias, first, weight[0])
    for k, inputs in enumerate(shifted, 1):
        y = torch.addcmul(y, inputs, weight[k])
    return functional.silu(y) if silu else y


def _sizes(x: Tensor, weight: Tensor) -> tuple[tuple[int, ...], dict[str, int]]:
    batch, length, row = x.shape
    span = span_of_job(row, batch)
    work = weight.shape[0] * x.numel()
    return (batch, length, weight.shape[0], row, span), {"jobs": batch * -(-row // span), "work": work}


def _known(weight: Tensor) -> int:
    return weight.shape[0] if weight.shape[0] <= 4 else 0


def _forward(
    keep: bool, x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, dtype: torch.dtype
) -> tuple[tuple, tuple]:
    from recurra.layers._cpu import shifted_kernels, width_for

    inputs = last_dim_contiguous(x.detach().resolve_neg())
    before, rows = state.detach().resolve_neg().contiguous(), weight.resolve_neg().contiguous()
    added = before.new_zeros(x.shape[2]) if bias is None else bias.detach().resolve_neg().contiguous()
    y, (sizes, work) = before.new_empty(x.shape), _sizes(x, weight)
    shifted_kernels(NUMBERS[dtype], _known(weight), width_for(x.shape[2])).forward(
        describe(inputs), *addresses(before, rows, added, y), int(silu), *sizes, **work
    )
    return (y,), (x, state, weight, bias)


def _backward(
    gradients: tuple, saved: tuple, needs: tuple, silu: bool, dtype: torch.dtype
) -> tuple[Tensor | None, ...]:
    from recurra.layers._cpu import shifted_kernels, width_for

    (gradient,), (x, state, weight, bias) = gradients, saved
    _check(x, state, weight, bias)  # again: hooks may have changed what was saved
    require_layouts(dtype, torch.device("cpu"), x=(x, gradient.shape))
    inputs, before, rows = (
        last_dim_contiguous(x.resolve_neg()),
        *(t.resolve_neg().contiguous() for t in (state, weight)),
    )
    added = before.new_zeros(x.shape[2]) if bias is None else bias.resolve_neg().contiguous()
    given, (sizes, work) = gradient.contiguous(), _sizes(x, weight)
    d_x, d_state = x.new_empty(x.shape), state.new_empty(state.shape)
    sums = state.new_zeros(x.shape[0], weight.shape[0] + 1, x.shape[2] + 16)  # padded, as the kernel says
    rings = torch.empty_like(sums)
    places = addresses(before, rows, added, given, d_x, d_state, sums, rings)
    kernels = shifted_kernels(NUMBERS[dtype], _known(weight), width_for(x.shape[2]))
    kernels.backward(describe(inputs), *places, int(silu), *sizes, **work)
    found = sums.sum(0)[:, : x.shape[2]]
    return d_x, d_state, found[:-1], None if bias is None else found[-1]


_shifted_products = Differentiable(
    _forward, _backward, n_inputs=4, reference=lambda *inputs: (_shifted_products_reference(*inputs),)
)


_MANY = 16  # weights: with fewer, shifted products are faster than transforms


class ShortConvolution(nn.Module):
    """y_t = bias + sum_{k < K} weight_k x_{t - K + 1 + k}: every channel has its own filter of K = `kernel_size` steps.

    The last weight multiplies the current step, as in `torch.nn.Conv1d` over inputs padded on the left.

    The weights have the names, shapes (D, 1, K) and start of `torch.nn.Conv1d(D, D, K, groups=D)`, so that published
    ones load. The state is the last K - 1 counted inputs (B, K - 1, D), the oldest first: in x's own layout, a step
    appends its input and reads K rows. It is float32 or better, and so is the sum, whatever the precision of x.

    Padding may be anywhere. With a mask, the unmasked steps are gathered, convolved, and put back, so a mixer that uses
    this layer can set `skips_padding`.

    It adds K shifted products, in one kernel on a CPU, which is faster there than `torch.nn.functional.conv1d`
    (docs/lab-log.md). From 16 weights on, long pieces go through the fast Fourier transform.

    Args:
        channels: D.
        kernel_size: K, including the current step.
        bias: whether to add a learned bias per channel.

    Raises:
        ValueError: a size is below 1.
    """

    def __init__(self, channels: int, kernel_size: int = 4, *, bias: bool = True) -> None:
        super().__init__()
        require_at_least(1, channels=channels, kernel_size=kernel_size)
        self.kernel_size = kernel_size
        bound = kernel_size**-0.5
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound)) if bias else None

    def forward(
        self,
        x: Float[Tensor, "B L D"],
        state: Float[Tensor, "B K_1 D"] | None = None,
        mask: Bool[Tensor, "B L"] | None = None,
        *,
        silu: bool = False,
    ) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B K_1 D"]]:
        """Convolve at least one step.

        Args:
            x: the inputs; at padding they are not read, not even NaN.
            state: the last K - 1 counted inputs before these; zeros if None.
            mask: True where a step counts.
            silu: return SiLU(y), in float32 or better.

        Returns:
            y in x's type, anything at padding, and the next state, in memory of its own.
        """
        if state is None:
            real = torch.promote_types(x.dtype, torch.float32)
            state = x.new_zeros((x.shape[0], self.kernel_size - 1, x.shape[2]), dtype=real)
        kind = torch.promote_types(x.dtype, torch.float32) if silu else x.dtype
        if mask is None:
            return self._of_all_steps(x, state, silu, kind)
        counted_first = torch.argsort((~mask).byte(), dim=1, stable=True)
        moved = _rows(at_least_float32(mask_fill(x, mask, 0)), counted_first)
        known, y = torch.cat([state, moved], 1), self._convolve(moved, state, silu).to(kind)
        last = mask.sum(1, keepdim=True) + torch.arange(self.kernel_size - 1, device=x.device)
        return _rows(y, (mask.cumsum(1) - 1).clamp(min=0)), _rows(known, last)

    def _of_all_steps(self, x: Tensor, state: Tensor, silu: bool, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        length, n_before = x.shape[1], self.kernel_size - 1
        y = self._convolve(x, state, silu).to(kind)
        if not is_any_length(length) and length >= n_before:  # without a copy of all inputs
            return y, x[:, length - n_before :].to(state.dtype, copy=True)
        return y, torch.cat([state, at_least_float32(x)], 1)[:, length:].clone()

    def _convolve(self, x: Tensor, state: Tensor, silu: bool) -> Tensor:
        """The outputs of x, from its steps and the K - 1 before."""
        weight = at_least_float32(self.weight)[:, 0].t()  # (K, D)
        bias = None if self.bias is None else at_least_float32(self.bias)
        is_one_step = not isinstance(x.shape[1], torch.SymInt) and x.shape[1] == 1
        if not is_one_step and self.kernel_size < _MANY:
            return shifted_products(x, state, weight, bias, silu)
        x = at_least_float32(x)
        if is_one_step:
            y = (torch.cat([state, x], 1) * weight).sum(1, keepdim=True)
        else:
            y, _ = convolve_window(x, weight.flip(0), state)
        y = y if bias is None else y + bias
        return functional.silu(y) if silu else y


def _rows(x: Float[Tensor, "B L D"], steps: Tensor) -> Float[Tensor, "B n D"]:
    """The chosen steps of each sequence, (B, n): whole rows, which is faster than torch.gather by number."""
    offsets = torch.arange(x.shape[0], device=x.device)[:, None] * x.shape[1]
    return x.flatten(0, 1).index_select(0, (steps + offsets).flatten()).unflatten(0, steps.shape)


def mixed(
    now: Float[Tensor, "B L D"], previous: Float[Tensor, "B L D"], share: Float[Tensor, " D"]
) -> Float[Tensor, "B L D"]:
    """share * now + (1 - share) * previous."""
    share = at_least_float32(share)
    return share * now + (1 - share) * previous


def with_previous(
    x: Float[Tensor, "B L D"], before: Float[Tensor, "B D"], mask: Bool[Tensor, "B L"] | None
) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"], Float[Tensor, "B D"]]:
    """Return x, the counted step before each, and the last counted step: what `before` is in the next call.

    This is RWKV's token shift (Peng et al. 2023, arXiv 2305.13048, section 3.1). x has at least one step; padding may
    stand anywhere and is not read. All three are float32 or better, the last one in memory of its own.
    """
    x = at_least_float32(x)
    known = torch.cat([before[:, None], x], 1)
    if mask is None:
        return x, known[:, :-1], known[:, -1].clone()
    steps = torch.arange(1, known.shape[1], device=x.device) * mask
    places = torch.cat([torch.zeros_like(steps[:, :1]), steps], 1).cummax(1).values
    rows = torch.take_along_dim(known, places[..., None], 1)
    return x, rows[:, :-1], rows[:, -1].clone()
