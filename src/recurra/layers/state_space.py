"""Diagonal state space models: discretised, and run as a recurrence or as a convolution.

    continuous   dh/dt = lambda h + B x        y = Re(C h)            GateLoop (2)-(3)
    discrete     h_t = a h_{t-1} + b x_t       y_t = Re(c h_t)        GateLoop (4)-(5)

lambda and a are diagonal, with one complex number per mode. If modes come in conjugate pairs, we keep one of each pair
and c holds 2 C, because a pair adds C h + conj(C h) = 2 Re(C h).

There are two kinds of model. With one model per channel ("SISO": S4D), every channel has n modes of its own, a, b and c
have shape (D, n), and `run_channels` applies them. With one model over all channels ("MIMO": S5, LRU), one set of N
modes reads and writes all channels through dense b (N, D) and c (D, N), and `run_dense` applies it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import choose, require, require_at_least, require_positive
from recurra.layers.convolution import causal_convolution
from recurra.layers.norms import at_least_float32
from recurra.lengths import mask_fill
from recurra.ops._operator import OneNode, is_any_length, without_autocast
from recurra.ops.scan.operator import linear_scan
from recurra.state import last_step

_SHORT = 8
"""Shorter pieces run as a recurrence. With 64 channels of 32 modes on one core, the recurrence was faster than the
convolution below 3 to 10 steps for 32 streams (training, inference), and below about 50 steps for a single stream,
where it saves a third of a millisecond."""


def require_pairs(d_state: int) -> None:
    """Refuse a number of modes that cannot form conjugate pairs."""
    is_even = d_state >= 2 and d_state % 2 == 0
    require(is_even, "d_state", d_state, "an even number from 2", "modes come in conjugate pairs")


class ChannelSSM(NamedTuple):
    """A discrete model for each of D channels, with n modes each: h_t = a h_{t-1} + b x_t, y_t = Re sum_n c h_t."""

    a: Complex[Tensor, "D n"]
    b: Complex[Tensor, "D n"]
    c: Complex[Tensor, "D n"]


class _Discretised(NamedTuple):
    """One step of a mode: h_t = a h_{t-1} + factor * (B x_t)."""

    a: Complex[Tensor, "*modes"]
    factor: Complex[Tensor, "*modes"]


def zero_order_hold(eigenvalues: Complex[Tensor, "*modes"], step: Float[Tensor, "*#modes"]) -> _Discretised:
    """a = exp(step lambda), factor = (a - 1) / lambda (GateLoop (5)): exact if the input is constant within a step.

    That is, it solves GateLoop (3b) for such an input. As step goes to 0, a goes to 1 and factor to 0 (GateLoop (6)).
    """
    scaled = step * eigenvalues
    return _Discretised(torch.exp(scaled), torch.expm1(scaled) / eigenvalues)


def _bilinear(eigenvalues: Complex[Tensor, "*modes"], step: Float[Tensor, "*#modes"]) -> _Discretised:
    """a = (1 + s) / (1 - s), factor = step / (1 - s) with s = step lambda / 2: the trapezoidal rule."""
    half = step * eigenvalues / 2
    return _Discretised((1 + half) / (1 - half), step / (1 - half))


_DISCRETISATIONS: dict[str, Callable[[Tensor, Tensor], _Discretised]] = {"zoh": zero_order_hold, "bilinear": _bilinear}


def _logarithms(smallest: float, largest: float) -> tuple[float, float]:
    require_positive(min_step=smallest, max_step=largest)
    require(smallest <= largest, "min_step", smallest, f"at most max_step = {largest}")
    return math.log(smallest), math.log(largest)


def log_spaced_steps(n_steps: int, smallest: float, largest: float) -> Float[Tensor, " n_steps"]:
    """Return the logarithms of logarithmically spaced step sizes, in random order.

    The order is random so that step sizes do not depend on frequencies; the published code of S4D and S5 draws the
    logarithms uniformly instead.
    """
    return torch.linspace(*_logarithms(smallest, largest), n_steps)[torch.randperm(n_steps)]


def fixed_transition(a: Complex[Tensor, "*modes"], x: Float[Tensor, "B L D"]) -> tuple[Tensor, Tensor]:
    """Return |a| and the phase of a in radians as (B, L, modes) for plotting gates: the same at every step of x."""
    shape = (*x.shape[:2], -1)
    return a.abs().flatten().expand(shape), a.angle().flatten().expand(shape)


def run_channels(
    x: Float[Tensor, "B L D"], ssm: ChannelSSM, h0: Complex[Tensor, "B D n"] | None = None
) -> tuple[Float[Tensor, "B L D"], Complex[Tensor, "B D n"]]:
    """Apply each channel's own model, y_t = Re sum_n c_n h_t,n (GateLoop (4)), and return the last state.

    Sequences of at least `SHORT` steps are convolved with the kernel Re sum_n c_n a_n^t b_n, which forms no state but
    the last; shorter ones run as a recurrence, and so do traces for any length. Both give the same result.
    """
    if torch.compiler.is_dynamo_compiling() and is_any_length(x.shape[1]):
        return _any_channels(x, *ssm, h0)
    is_any = isinstance(x.shape[1], torch.SymInt)  # traced for every length, short or long
    is_long = not is_any and x.shape[1] >= _SHORT and x.shape[0] > 0  # an empty batch has no transform in torch
    return (_run_channels_by_convolution if is_long else _run_channels_by_recurrence)(x, ssm, h0)


_any_channels = OneNode(
    "channel_modes(Tensor x, Tensor a, Tensor b, Tensor c, Tensor? h0) -> (Tensor, Tensor)",
    lambda x, a, b, c, h0: run_channels(x, ChannelSSM(a, b, c), h0),
    lambda x, a, *_: (x.new_empty(x.shape), a.new_empty((x.shape[0], *a.shape))),
    n_inputs=5,
)


def _run_channels_by_recurrence(x: Tensor, ssm: ChannelSSM, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`run_channels` as a linear scan: O(L) work, with memory for the states of all steps."""
    h0 = ssm.a.new_zeros((x.shape[0], *ssm.a.shape)) if h0 is None else h0
    h = linear_scan(ssm.a, x[..., None] * ssm.b, h0)
    return (h * ssm.c).real.sum(-1), last_step(h, h0)


def _run_channels_by_convolution(x: Tensor, ssm: ChannelSSM, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`run_channels` in O(L log L) by the fast Fourier transform, for B and L of at least 1."""
    length = x.shape[1]
    block = 1 << (length.bit_length() + 1) // 2
    with without_autocast(x):  # bfloat16 is too coarse for powers
        # a^t as (a^m)^i a^j for t = i m + j: within (D, m, n) a block, and jumps (D, I + 1, n) over the blocks
        within = _powers(ssm.a, block)
        jumps = _powers(within[:, -1] * ssm.a, -(-length // block) + 1)
        signal = x.transpose(1, 2)
        weights = (ssm.c * ssm.b)[None]  # the kernel is the output from an initial state of b
        if h0 is not None:
            weights = torch.cat([weights, ssm.c * ssm.a * h0])
        responses = _decay(weights, jumps, within, length)
        y = causal_convolution(x, responses[0].t())
        last = ssm.b * _accumulate(signal, jumps, within)
        if h0 is not None:
            y = y + responses[1:].transpose(1, 2)
            last = last + jumps[:, length // block] * within[:, length % block] * h0
    return y, last


def run_dense(
    x: Float[Tensor, "B L D"],
    a: Complex[Tensor, " N"],
    b: Complex[Tensor, "N D"],
    c: Complex[Tensor, "D N"],
    h0: Complex[Tensor, "B N"],
    mask: Bool[Tensor, "B L"] | None = None,
) -> tuple[Float[Tensor, "B L D"], Complex[Tensor, "B N"]]:
    """Apply one set of modes to all channels, h_t = a h_{t-1} + b x_t, y_t = Re(c h_t) (GateLoop (4)).

    Returns y and the last state. Where `mask` is False the state passes through unchanged and y is meaningless.

    The products with b and c are real, over real and imaginary parts side by side, in the precision of x (or of
    autocast); the recurrence runs in float32 or better.
    """
    into = torch.view_as_real(b).transpose(1, 2).flatten(0, 1)  # (2 N, D): rows re, im, re, im, ...
    out_of = torch.stack([c.real, -c.imag], -1).flatten(1)  # (D, 2 N)
    driven = at_least_float32(functional.linear(x, into.to(x.dtype))).unflatten(-1, (-1, 2))
    if mask is not None:
        a = mask_fill(a.expand(*x.shape[:2], -1), mask, 1)
    h = linear_scan(a, mask_fill(torch.view_as_complex(driven), mask, 0), h0)
    y = functional.linear(torch.view_as_real(h).flatten(-2).to(x.dtype), out_of.to(x.dtype))
    return y, last_step(h, h0)


def _powers(a: Tensor, count: int) -> Tensor:
    """a^0 ... a^(count - 1) as (D, count, n), by doubling: exact at a = 0, in value and gradient."""
    powers, factor = torch.ones_like(a)[:, None], a[:, None]
    while powers.shape[1] < count:
        powers = torch.cat([powers, powers * factor], 1)
        factor = factor * factor
    return powers[:, :count]


def _decay(weights: Tensor, jumps: Tensor, within: Tensor, length: int) -> Tensor:
    """Re sum_n w_n a_n^t for t = 0 ... L - 1 and weights (K, D, n): (K, D, L)."""
    n_rows = weights.shape[0]
    left = (weights.transpose(0, 1)[:, :, None] * jumps[:, None, :-1]).flatten(1, 2)  # (D, K I, n)
    left = torch.cat([left.real, -left.imag], -1)
    right = torch.cat([within.real, within.imag], -1)
    blocks = (left @ right.transpose(1, 2)).unflatten(1, (n_rows, -1))  # (D, K, I, m)
    return blocks.flatten(2)[..., :length].transpose(0, 1)


def _accumulate(signal: Tensor, jumps: Tensor, within: Tensor) -> Tensor:
    """sum_t a^(L - 1 - t) x_t for x (B, D, L): the state after L steps, (B, D, n), before the product with b."""
    n_blocks, block = jumps.shape[1] - 1, within.shape[1]
    signal = functional.pad(signal, (n_blocks * block - signal.shape[2], 0))  # leading zeros change nothing
    blocks = signal.transpose(0, 1).unflatten(-1, (n_blocks, block))  # (D, B, I, m)
    remaining = within.flip(1)
    summed = blocks.flatten(1, 2) @ torch.cat([remaining.real, remaining.imag], -1)  # (D, B I, 2 n)
    re, im = summed.unflatten(1, (-1, n_blocks)).chunk(2, -1)
    return (torch.complex(re, im) * jumps[:, None, :-1].flip(2)).sum(2).transpose(0, 1)


def _hippo_normal_modes(d_state: int, paired: bool = True) -> tuple[Float[Tensor, " n"], Complex[Tensor, "N n"]]:
    """Return one mode of each pair of HiPPO-N, the normal part of HiPPO-LegS, of even size N = d_state, or all modes.

    The eigenvalues are -1/2 + i frequency (Gu et al. 2022, arXiv 2111.00396; S5, arXiv 2208.04933, section 2.3).
    """
    require_pairs(d_state)
    i = torch.arange(d_state, dtype=torch.float64)
    p = (i + 0.5).sqrt()
    skew = -torch.outer(p, p) * torch.sign(i[:, None] - i)
    frequency, vectors = torch.linalg.eigh(-1j * skew)
    first = d_state // 2 if paired else 0
    return frequency[first:], vectors[:, first:]


def most_heads(channels: int, least: int) -> int:
    """Return the most heads of equal size with at least this many channels each, and at least one head."""
    return next(n for n in range(max(channels // least, 1), 0, -1) if channels % n == 0)


def spread_over_heads(groups: Float[Tensor, "B L G N"], n_heads: int) -> Float[Tensor, "B L H N"]:
    """Give every head what its group has; `n_heads` is a multiple of the groups."""
    *along, n_groups, size = groups.shape
    return groups[..., None, :].expand(*along, n_groups, n_heads // n_groups, size).flatten(2, 3)


def inverse_softplus_of_steps(n_steps: int, smallest: float, largest: float) -> Float[Tensor, " n_steps"]:
    """Draw step sizes, their logarithms uniformly, and return what softplus turns into them (Gu & Dao, section 3.6)."""
    low, high = _logarithms(smallest, largest)
    step = torch.exp(low + (high - low) * torch.rand(n_steps))
    return step + torch.log(-torch.expm1(-step))


def linear_frequencies(d_state: int) -> Float[Tensor, " n"]:
    """S4D-Lin: pi k for the kept modes k = 0 ... d_state / 2 - 1 (GateLoop section 2.2)."""
    return math.pi * torch.arange(d_state // 2)


def inverse_frequencies(d_state: int) -> Float[Tensor, " n"]:
    """S4D-Inv: (N / pi) (N / (2 k + 1) - 1) with N = d_state, close to the frequencies of HiPPO-LegS.

    GateLoop section 2.2 prints (l / pi) (l / (k + 1) + 1). The S4D paper's formula (Gu et al. (9)), its authors' code
    and the spectrum of HiPPO-LegS agree with each other and not with the print, so we use them.
    """
    k = torch.arange(d_state // 2)
    return d_state / math.pi * (d_state / (2 * k + 1) - 1)


_FREQUENCIES: dict[str, Callable[[int], Tensor]] = {"lin": linear_frequencies, "inv": inverse_frequencies}


class _Modes(nn.Module):
    """What bases of mixers with modes share: lambda = -exp(log_decay) + i frequency makes a, with exp(log_step)."""

    log_step: nn.Parameter
    log_decay: nn.Parameter
    frequency: nn.Parameter
    discretise: Callable[[Tensor, Tensor], _Discretised]
    slowest = 0.0

    def transition_parameters(self) -> set[nn.Parameter]:
        """Step sizes and eigenvalues, which make a: they may want their own learning rate and no weight decay."""
        return {self.log_step, self.log_decay, self.frequency}

    def transition(self, x: Float[Tensor, "B L d_model"]) -> tuple[Float[Tensor, "B L _"], Float[Tensor, "B L _"]]:
        """Return |a| and its phase in radians for every kept mode, the same at every step."""
        return fixed_transition(self.discretised().a, x)

    def discretised(self) -> _Discretised:
        """Return a and the factor of B. Every mode decays, for any values of the parameters."""
        step, log_decay = torch.exp(at_least_float32(self.log_step)), at_least_float32(self.log_decay)
        eigenvalues = torch.complex(-torch.exp(log_decay), at_least_float32(self.frequency))
        if self.slowest:
            eigenvalues = torch.complex(eigenvalues.real.clamp(max=-self.slowest), eigenvalues.imag)
        return self.discretise(eigenvalues, step[:, None] if log_decay.dim() == 2 else step)


class ChannelModes(_Modes):
    """A base of mixers that have `d_state` modes in conjugate pairs for every channel, as parameters of their own.

    This is S4D (Gu et al. 2022, arXiv 2206.11893). One mode of each pair is kept, and c = 2 C. B is 1: its product with
    C is all that matters. Real parts start at -1/2, C is drawn from the complex normal distribution of variance 1 and
    the skip from N(0, 1).
    """

    def make_modes(
        self, n_channels: int, *, d_state: int, init: str, discretisation: str, min_step: float, max_step: float
    ) -> None:
        """Draw the parameters; the options are those of `recurra.mixers.s4d.S4D`."""
        require_pairs(d_state)
        frequency = choose("init", _FREQUENCIES, init)(d_state)
        self.discretise = choose("discretisation", _DISCRETISATIONS, discretisation)
        self.log_step = nn.Parameter(log_spaced_steps(n_channels, min_step, max_step))
        self.log_decay = nn.Parameter(torch.full((n_channels, d_state // 2), math.log(0.5)))
        self.frequency = nn.Parameter(frequency.repeat(n_channels, 1))
        self.output_weights = nn.Parameter(torch.randn(n_channels, d_state // 2, 2) * 0.5**0.5)  # C: real, imaginary
        self.skip = nn.Parameter(torch.randn(n_channels))

    def ssm(self) -> ChannelSSM:
        """Discretise the model of every channel."""
        return ChannelSSM(*self.discretised(), 2 * torch.view_as_complex(at_least_float32(self.output_weights)))


class DenseModes(_Modes):
    """A base of mixers that have one set of `d_state` modes over all channels: S5 (Smith et al., arXiv 2208.04933).

        h_t = a h_{t-1} + b x_t,  y_t = 2 Re(C h_t) + skip x_t,  a and b by zero-order hold (GateLoop (2)-(5))

    The state matrix starts as HiPPO-N in its eigenbasis V, with V folded in (GateLoop (3a)): V^-1 B and C V for
    real B ~ N(0, 1 / d_model) and C ~ N(0, 1 / d_state) (the published code draws C complex, of twice the variance).
    One mode of each conjugate pair is kept. Real parts are -exp(log_decay), so that no mode can grow (the published
    code leaves them free, or clips them). With J blocks the matrix is block-diagonal, of J equal HiPPO-N. The bilinear
    rule may take the place of zero-order hold. Unpaired, all modes are kept and trained apart, and y_t = Re(C h_t) +
    skip x_t.
    """

    paired = True

    def make_modes(
        self,
        d_model: int,
        *,
        d_state: int,
        min_step: float,
        max_step: float,
        blocks: int = 1,
        discretisation: str = "zoh",
        clip_eigs: bool = False,
        paired: bool = True,
    ) -> None:
        """Draw the parameters; the options are those of `recurra.mixers.s5_hyena.S5Hyena`."""
        require_at_least(1, blocks=blocks)
        fits = d_state % (2 * blocks) == 0
        require(fits, "blocks", blocks, f"a divisor of d_state / 2 = {d_state // 2}", "modes come in conjugate pairs")
        self.discretise = choose("discretisation", _DISCRETISATIONS, discretisation)
        self.slowest = 1e-4 if clip_eigs else 0.0  # real parts are at most minus this, as in S5's published code
        self.paired = paired
        (frequency, of_block), n_kept = _hippo_normal_modes(d_state // blocks, paired), d_state // (2 if paired else 1)
        vectors = torch.block_diag(*[of_block] * blocks)
        b = vectors.mH @ (torch.randn(d_state, d_model) * d_model**-0.5).to(vectors.dtype)
        c = (torch.randn(d_model, d_state) * d_state**-0.5).to(vectors.dtype) @ vectors
        self.log_step = nn.Parameter(log_spaced_steps(n_kept, min_step, max_step))
        self.log_decay = nn.Parameter(torch.full((n_kept,), math.log(0.5)))
        self.frequency = nn.Parameter(frequency.repeat(blocks).to(torch.get_default_dtype()))
        self.input_weights = nn.Parameter(_as_real(b))  # B: real, imaginary
        self.output_weights = nn.Parameter(_as_real(c))  # C: real, imaginary
        self.skip = nn.Parameter(torch.randn(d_model))

    def run_modes(
        self, x: Float[Tensor, "B L d_model"], h: Complex[Tensor, "B n"], mask: Bool[Tensor, "B L"] | None
    ) -> tuple[Float[Tensor, "B L d_model"], Complex[Tensor, "B n"]]:
        """Return y and the modes after the last step; where `mask` is False they pass through."""
        a, factor = self.discretised()
        b = factor[:, None] * torch.view_as_complex(at_least_float32(self.input_weights))
        c = (2 if self.paired else 1) * torch.view_as_complex(at_least_float32(self.output_weights))
        y, h = run_dense(x, a, b, c, h, mask)
        return y + self.skip * x, h


def _as_real(z: Complex[Tensor, "rows columns"]) -> Float[Tensor, "rows columns 2"]:
    return torch.view_as_real(z.resolve_conj()).to(torch.get_default_dtype())
