"""How gradients flow between the segments of a Compact Recurrent Transformer: ||dy_k/dy_i|| against CRT (2).

y are the last block's outputs, numbered along the stream, and h the memory RNN's states. The only path between segments
is the memory vector. For y_k in segment t and y_i in an earlier segment p, let m be the memory at the start of segment
t, which is the h of the last output before it:

    dy_k/dy_i = dy_k/dm  dm/dy_i                                   always
    dm/dy_i   = dm/dh_{tn-1} ... dh_{i+1}/dh_i  dh_i/dy_i          if p = t - 1: CRT Theorem 3, CRT (12)

If there are segments in between, Theorem 3 is not the whole derivative: the memory that enters such a segment also
changes the segment's outputs, and the RNN reads those. Theorem 3's product holds them fixed. So we measure two things:
the `total` derivative along all paths, and the `direct` chain, which is the product of Theorem 3 along the RNN alone.
CRT (2) bounds the direct chain for every p, and the total derivative for p = t - 1, where the two are equal. (The
paper's last factor, dh_j/dy_i, should be dh_i/dy_i, as in the proof.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from recurra.analysis.gradient_bound import a_priori_step_bound, log10_powers, log10_products, step_bound
from recurra.analysis.jacobians import Track, jacobians, spectral_norms, step_jacobians, untracked
from recurra.analysis.memory_trace import MemoryTrace, memory_rnn, trace_memory
from recurra.cells import NCGRUCell
from recurra.checks import require
from recurra.mixers.rnn import RNNState
from recurra.models import CompactRecurrentTransformer, CompactRecurrentTransformerState


@dataclass(frozen=True, eq=False)
class StepGradients:
    """The memory RNN's T steps over the outputs of all segments except the last; float64, on the CPU."""

    norms: Float[Tensor, " T"]
    """||dh_t/dh_{t-1}||_2, measured."""
    input_norms: Float[Tensor, " T"]
    """||dh_t/dy_t||_2, measured."""
    alpha: Float[Tensor, " T"]
    """alpha_t, CRT (6)."""
    beta: Float[Tensor, " T"]
    """beta_t, CRT (7)."""
    candidate_norm: float
    """||U_c||_2."""
    bound_a_priori: float
    """The bound on `bounds` given only the weights, CRT (10)."""

    @property
    def bounds(self) -> Float[Tensor, " T"]:
        """alpha_t + beta_t ||U_c||_2, the bound on `norms`, CRT (5)."""
        return self.alpha + self.beta * self.candidate_norm


@dataclass(frozen=True, eq=False)
class GradientFlow:
    """Spectral norms between outputs of different segments, and their bounds; float64, on the CPU.

    The T sources are all outputs of the segments before the last, and the K targets are chosen outputs of the last one.
    Positions count from 0 at the first token measured. Bounds are base-10 logarithms, because they can exceed float64.
    """

    segment_length: int
    """Tokens of a segment."""
    sources: Int[Tensor, " T"]
    """The position i of each y_i."""
    targets: Int[Tensor, " K"]
    """The position k of each y_k."""
    total: Float[Tensor, "K T"]
    """||dy_k/dy_i||_2 along all paths."""
    direct: Float[Tensor, "K T"]
    """||dy_k/dy_i||_2 along the memory RNN alone, with the outputs in between fixed: the product of CRT (12)."""
    log10_bound: Float[Tensor, "K T"]
    """Bound on `direct`: ||dy_k/dm|| ||dh_i/dy_i|| times alpha_t + beta_t ||U_c|| of every later step."""
    log10_bound_of_largest: Float[Tensor, "K T"]
    """The same with the largest of these factors in place of each: a power, as in CRT (2)."""
    log10_bound_a_priori: Float[Tensor, "K T"]
    """The same with the bound on a factor given only the weights, CRT (10)."""
    log10_bound_measured: Float[Tensor, "K T"]
    """The same with each step's measured norm: the smallest bound that step-by-step bounds can give."""
    memory_norms: Float[Tensor, " K"]
    """||dy_k/dm||_2."""
    steps: StepGradients
    """The memory RNN's steps; step t computes h_t."""
    orthogonality_error: float | None
    """||U_c^T U_c - I|| (Frobenius) in the model's own precision; None if the cell does not keep U_c orthogonal."""

    @property
    def distances(self) -> Int[Tensor, "K T"]:
        """k - i in tokens."""
        return self.targets[:, None] - self.sources


@torch.enable_grad()
def measure_gradient_flow(
    model: nn.Module,
    tokens: Int[Tensor, "streams L"],
    state: CompactRecurrentTransformerState | None = None,
    *,
    at: Sequence[int] = (0, -1),
    track: Track = untracked,
) -> GradientFlow:
    """Measure how the outputs of the last segment depend on those of earlier segments (CRT (2)-(3), CRT (12)-(14)).

    A copy of the model runs on the CPU in float64 and in evaluation mode. The Jacobians, d_model by d_model, are exact:
    they come from reverse-mode differentiation with many vectors at once. Norms are the largest of all singular values.

    Args:
        model: a `CompactRecurrentTransformer` with a memory; it is left unchanged.
        tokens: one stream of at least two whole segments.
        state: the state of the stream before them, at the end of a segment; None starts a stream.
        at: the targets, by position in the last segment; negative positions count from its end.
        track: reports progress.

    Raises:
        ValueError: the model has no memory vector, the tokens are not two or more whole segments of one stream, the
            state is inside a segment, or a target is outside the segment.
    """
    cell = memory_rnn(model).cell
    assert isinstance(model, CompactRecurrentTransformer)
    n = model.config.segment_length
    targets = _positions(at, n)
    trace = trace_memory(model, tokens, state)
    memory, last = trace.memories[-1][0], trace.outputs[-1][0]
    from_memory = torch.stack([jacobians(last[k], [trace.memories[-1]], "dy/dm", track)[0].flatten(1) for k in targets])
    by_all_paths = torch.cat(jacobians(memory, trace.outputs[:-1], "dm/dy by all paths", track), 2)[:, 0]
    steps = _step_gradients(trace, track)
    memory_norms = spectral_norms(from_memory, "norms of dy/dm", track)
    ends = memory_norms.log10()[:, None] + steps.input_norms.log10()
    n_sources = len(steps.norms)
    return GradientFlow(
        segment_length=n,
        sources=torch.arange(n_sources),
        targets=torch.tensor(targets) + n_sources,
        total=_chained_norms(from_memory, by_all_paths, "norms of dy/dy by all paths", track),
        direct=_chained_norms(from_memory, _along_rnn(trace, track), "norms of dy/dy along the RNN", track),
        log10_bound=ends + log10_products(steps.bounds),
        log10_bound_of_largest=ends + log10_powers(steps.bounds),
        log10_bound_a_priori=ends + log10_powers(torch.full_like(steps.norms, steps.bound_a_priori)),
        log10_bound_measured=ends + log10_products(steps.norms),
        memory_norms=memory_norms,
        steps=steps,
        orthogonality_error=float(cell.orthogonality_error()) if isinstance(cell, NCGRUCell) else None,
    )


def _positions(at: Sequence[int], n: int) -> list[int]:
    outside = [position for position in at if not -n <= position < n]
    expected = f"one or more positions in a segment of {n} tokens, {-n} to {n - 1}"
    require(bool(at) and not outside, "at", list(at), expected)
    return [position % n for position in at]


def _along_rnn(trace: MemoryTrace, track: Track) -> Float[Tensor, "d T d"]:
    """dm/dy_i of each source with the other outputs fixed: the RNN reads all of them as if they were data."""
    y = torch.cat(trace.outputs[:-1], 1).detach().requires_grad_()
    _, last = trace.rnn(y, RNNState(trace.memories[0].detach()))
    return jacobians(last.h[0], [y], "dm/dy along the RNN", track)[0][:, 0]


def _chained_norms(
    from_memory: Float[Tensor, "K d d"], into_memory: Float[Tensor, "d T d"], name: str, track: Track
) -> Float[Tensor, "K T"]:
    """||dy_k/dm dm/dy_i||_2."""
    sources = into_memory.transpose(0, 1)
    return torch.stack([spectral_norms(of_target @ sources, name, track) for of_target in from_memory])


def _step_gradients(trace: MemoryTrace, track: Track) -> StepGradients:
    cell = trace.rnn.cell
    y = torch.cat(trace.outputs[:-1], 1)[0].detach().requires_grad_()
    h = torch.cat([trace.memories[0][:, None], *trace.states[:-1]], 1)[0, :-1].detach().requires_grad_()
    after = cell.step(cell.project(y), h, cell.recurrent_weights(y.dtype))
    by_state, by_input = step_jacobians(after, [h, y], "dh/dh and dh/dy of the steps", track)
    bound = step_bound(cell, y, h)
    return StepGradients(
        norms=spectral_norms(by_state, "norms of dh/dh", track),
        input_norms=spectral_norms(by_input, "norms of dh/dy", track),
        alpha=bound.alpha,
        beta=bound.beta,
        candidate_norm=float(bound.candidate_norm),
        bound_a_priori=float(a_priori_step_bound(cell)),
    )
