"""The time-invariant recurrence as a causal convolution, by the fast Fourier transform."""

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.nn import functional

from recurra.checks import kind_of, require_tensor, sentence
from recurra.ops.scan.operator import linear_scan

_BLOCK = 32
"""Steps that are computed without a transform."""


def convolution_scan(a: Tensor, b: Shaped[Tensor, "B L *channels"]) -> Shaped[Tensor, "B L *channels"]:
    """Compute h_t = a h_{t-1} + b_t from h_0 = 0 as h_t = sum_k a^k b_{t-k} (GateLoop (10); notes, convolution).

    The kernel 1, a, a^2, ... (notes, kernel) is applied by fast Fourier transform, in O(L log L).

    Args:
        a: the transition, the same at every step, real or complex: a shape that broadcasts to b's channels.
        b: the inputs, (B, L, *channels), float32 or float64, real or complex.

    Returns:
        h, (B, L, *channels). Its error is relative to the norms of kernel and earlier inputs, not to each h, and
        independent of later inputs. For |a| > 1 the powers grow over the whole length: use `linear_scan` instead.

    Raises:
        TypeError: a or b is not a tensor, or has another type.
        ValueError: a does not broadcast to b's channels.
    """
    for name, tensor in (("a", a), ("b", b)):
        require_tensor(name, tensor)
        if tensor.dtype not in (torch.float32, torch.float64, torch.complex64, torch.complex128):
            raise TypeError(sentence(name, kind_of(tensor), "float32, float64, complex64 or complex128"))
    if b.dim() < 2:
        raise ValueError(sentence("b", kind_of(b), "(B, L, *channels)"))
    channels = tuple(b.shape[2:])
    if a.dim() > len(channels) or any(n not in (1, m) for n, m in zip(a.shape[::-1], channels[::-1])):
        raise ValueError(sentence("a", kind_of(a), f"a shape that broadcasts to b's channels {channels}"))
    length, dtype = b.shape[1], torch.promote_types(a.dtype, b.dtype)
    if b.numel() == 0:
        return (a * b).to(dtype)
    a, b = (x.to(dtype if x.is_complex() else dtype.to_real()) for x in (a, b))  # one precision for both transforms
    a = a.expand(channels)
    # (L, *channels): a^0, a^1, ... by running products, which are exact at a = 0, in value and gradient
    kernel = torch.cat([torch.ones_like(a)[None], a.expand(length - 1, *channels)]).cumprod(0)
    kernel, b = kernel.flatten(1), b.flatten(2)
    blocks = functional.pad(b, (0, 0, 0, -length % _BLOCK)).unflatten(1, (-1, _BLOCK)).flatten(0, 1)
    within = linear_scan(kernel[min(1, length - 1)], blocks).unflatten(0, (len(b), -1)).flatten(1, 2)[:, :length]
    return (within + convolve_across(b, kernel, _BLOCK)).unflatten(2, channels)


def convolve_across(x: Shaped[Tensor, "B L D"], filters: Shaped[Tensor, "K D"], block: int) -> Shaped[Tensor, "B L D"]:
    """Add up what earlier blocks of so many steps send to each step: sum of filter_s x_{t-s} over them.

    The first half of x goes into the second by one Fourier transform, and each half is computed the same way, down to
    the blocks: O(L log^2 L). So an input disturbs no output before it, not even by rounding, as it would in one
    transform over all of x; gradients are as causal in the other direction. B and L are at least 1.
    """
    length, n_taps, half = x.shape[1], filters.shape[0], block
    is_complex = x.is_complex() or filters.is_complex()
    transform, invert = (torch.fft.fft, torch.fft.ifft) if is_complex else (torch.fft.rfft, torch.fft.irfft)
    n_blocks = 1 << (-(-length // block) - 1).bit_length()
    signal, taps = functional.pad(x.transpose(1, 2), (0, n_blocks * block - length)), filters.t()
    y = torch.zeros_like(signal, dtype=torch.promote_types(x.dtype, filters.dtype))
    while half < length:
        pairs = -(-(length - half) // (2 * half))
        first, second = (z[..., : 2 * half * pairs].unflatten(-1, (pairs, 2, half)) for z in (signal, y))
        reach = min(half, 1 << (n_taps - 1).bit_length())  # filters are too short for inputs and outputs beyond
        size = 2 * reach
        spectrum = transform(first[..., 0, half - reach :], size) * transform(taps[:, :size], size)[:, None]
        second[..., 1, :reach] += invert(spectrum, size)[..., reach:]
        half *= 2
    return y[..., :length].transpose(1, 2)


def transform_length(at_least: int) -> int:
    """Return the smallest 2^i 3^j 5^k from `at_least` on.

    Such lengths are fast and exact to rounding in every library. With a large prime factor they are neither: MKL's
    float64 transform of length 2 x 127 loses two digits. A trace for any length cannot choose, and takes an even one.
    """
    if isinstance(at_least, torch.SymInt):
        return at_least + at_least % 2
    best = 1 << max(at_least - 1, 0).bit_length()
    fives = 1
    while fives < best:
        threes = fives
        while threes < best:
            best = min(best, threes << max(-(-at_least // threes) - 1, 0).bit_length())
            threes *= 3
        fives *= 5
    return best
