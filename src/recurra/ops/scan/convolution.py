"""The time-invariant recurrence as a causal convolution, by the fast Fourier transform."""

import torch
from jaxtyping import Shaped
from torch import Tensor

from recurra.checks import kind_of, require_tensor, sentence


def convolution_scan(a: Tensor, b: Shaped[Tensor, "B L *channels"]) -> Shaped[Tensor, "B L *channels"]:
    """Compute h_t = a h_{t-1} + b_t from h_0 = 0 as h_t = sum_k a^k b_{t-k} (GateLoop (10); notes, convolution).

    The kernel 1, a, a^2, ... (notes, kernel) is applied by fast Fourier transform, in O(L log L).

    Args:
        a: the transition, the same at every step, real or complex: a shape that broadcasts to b's channels.
        b: the inputs, (B, L, *channels), float32 or float64, real or complex.

    Returns:
        h, (B, L, *channels). The transform spreads its error over the sequence: it is relative to the norms of kernel
        and inputs, not to each h. So a large input disturbs the h before it, and an infinity makes all of them NaN.
        For |a| > 1 the powers grow over the whole length. `linear_scan` has neither limit.

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
    padded = transform_length(2 * length - 1)  # nothing wraps around
    if kernel.is_complex() or b.is_complex():
        spectrum = torch.fft.fft(kernel, padded, 0) * torch.fft.fft(b, padded, 1)
        return torch.fft.ifft(spectrum, padded, 1)[:, :length]
    spectrum = torch.fft.rfft(kernel, padded, 0) * torch.fft.rfft(b, padded, 1)
    return torch.fft.irfft(spectrum, padded, 1)[:, :length]


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
