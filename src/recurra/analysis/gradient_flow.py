"""How gradients flow between the segments of a Compact Recurrent Transformer: ||dy_k/dy_i|| against CRT (2).

y are the last block's outputs, numbered along the stream, and h the memory RNN's states. The only path between
segments is the memory vector. For y_k in segment t and y_i in an earlier segment p, let m be the memory at the start of
segment t, which is the h of the last output before it:

    dy_k/dy_i = dy_k/dm  dm/dy_i                                   always
    dm/dy_i   = dm/dh_{tn-1} ... dh_{i+1}/dh_i  dh_i/dy_i          if p = t - 1: CRT Theorem 3, CRT (12)

If there are segments in between, Theorem 3 is not the whole derivative: the memory that enters such a segment also
changes the segment's outputs, and the RNN reads those. So we measure two things: the `total` derivative along all
paths, and the `direct` chain, the product of Theorem 3 along the RNN alone. CRT (2) bounds the direct chain for every
p, and the total derivative for p = t - 1, where the two are equal. (The paper's last factor, dh_j/dy_i, should be
dh_i/dy_i, as in the proof.)
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from recurra.checks import kind_of, require, sentence
from recurra.mixers.rnn import RNN, RNNState
from recurra.models.compact_recurrent_transformer import (
    CompactRecurrentTransformer,
    CompactRecurrentTransformerState,
    RNNMemory,
)
from recurra.ops.cells.gru import GRUCell
from recurra.ops.cells.orthogonal import NCGRUCell
from recurra.state import map_tensors

_ROWS = 64
"""Rows that are differentiated together."""


def _jacobians(output: Float[Tensor, " d"], inputs: Sequence[Tensor]) -> list[Float[Tensor, "d ..."]]:
    return _products(output, inputs, torch.eye(len(output), dtype=output.dtype, device=output.device))


def _step_jacobians(outputs: Float[Tensor, "steps d"], inputs: Sequence[Tensor]) -> list[Float[Tensor, "steps d _"]]:
    """Differentiate each step's vector by the inputs of the same step; no output may depend on another step's input."""
    n_steps, d = outputs.shape
    rows = torch.eye(d, dtype=outputs.dtype, device=outputs.device)[:, None].expand(d, n_steps, d)
    return [of_input.transpose(0, 1) for of_input in _products(outputs, inputs, rows)]


def _products(output: Tensor, inputs: Sequence[Tensor], vectors: Tensor) -> list[Tensor]:
    """v^T J for each v in `vectors`, for each input."""
    # Not is_grads_batched=True, which is an older vmap and loops over the vectors at norms and softmax.
    products = torch.vmap(lambda v: torch.autograd.grad(output, list(inputs), v, retain_graph=True))
    return [torch.cat(of_input) for of_input in zip(*map(products, vectors.split(_ROWS)))]


_Item = TypeVar("_Item")


class Thinned(Generic[_Item]):
    """Keeps every n-th item from the first on; n is the smallest power of two that keeps at most `limit` (>= 2)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.stride = 1
        self.items: list[_Item] = []
        self._n_seen = 0

    def add(self, item: _Item) -> None:
        """Add the next item of the stream."""
        if self._n_seen % self.stride == 0:
            if len(self.items) == self.limit:
                self.items = self.items[::2]
                self.stride *= 2
            if self._n_seen % self.stride == 0:
                self.items.append(item)
        self._n_seen += 1


class _MemoryTrace(NamedTuple):
    """The inputs and outputs of the memory RNN with their graph, a tensor per segment; float64, on the CPU."""

    rnn: RNN  # its weights without gradients
    outputs: list[Float[Tensor, "1 n d"]]  # of the last block, y
    memories: list[Float[Tensor, "1 d"]]  # at the segment's start
    states: list[Float[Tensor, "1 n d"]]  # h after each output


def memory_rnn(model: nn.Module) -> RNN:
    """Return the RNN that computes a model's memory vector."""
    if isinstance(model, CompactRecurrentTransformer) and isinstance(model.memory, RNNMemory):
        return model.memory.rnn
    memory = f" with memory {model.config.memory!r}" if isinstance(model, CompactRecurrentTransformer) else ""
    hint = "use a recipe with `experiment: text-crt` and `model.memory: gru` or `ncgru`"
    raise ValueError(sentence("model", f"{kind_of(model)}{memory}", "one with a memory vector between segments", hint))


def _trace_memory(
    model: CompactRecurrentTransformer,
    tokens: Int[Tensor, "streams L"],
    state: CompactRecurrentTransformerState | None = None,
) -> _MemoryTrace:
    """Run a copy of the model in float64 and in evaluation mode, and keep the inputs and outputs of its memory RNN."""
    _require_whole_segments(tokens, model.config.segment_length, state)
    copy = deepcopy(model).to("cpu", torch.float64).eval().requires_grad_(False)
    rnn = memory_rnn(copy)
    trace = _MemoryTrace(rnn, [], [], [])

    def keep(module: nn.Module, arguments: tuple[Any, ...], result: tuple[Any, ...]) -> None:
        trace.outputs.append(arguments[0])
        trace.memories.append(arguments[1].h)
        trace.states.append(result[0])

    rnn.register_forward_hook(keep)
    # The graph begins at the embedded tokens.
    copy.embedding.register_forward_hook(lambda module, arguments, x: x.detach().requires_grad_())
    state = map_tensors(lambda tensor: tensor.detach().to("cpu", torch.float64), state)
    # The fused attention kernels have no rule for many vectors at once: torch would warn and loop over them.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        copy.hidden(tokens.cpu(), state)
    return trace


def _require_whole_segments(tokens: Tensor, n: int, state: CompactRecurrentTransformerState | None) -> None:
    n_streams, length = tokens.shape
    if n_streams != 1 or length < 2 * n or length % n:
        expected = f"one stream of two or more whole segments of {n} tokens, (1, {2 * n}) for two"
        raise ValueError(sentence("tokens", kind_of(tokens), expected))
    if state is not None and state.position:
        got = f"{state.position} tokens into a segment"
        raise ValueError(sentence("state", got, f"one at the end of a segment of {n} tokens"))


class StepBound(NamedTuple):
    """The terms of the bound on ||dh_t/dh_{t-1}||_2 at each step (CRT Lemma 1): CRT (6), CRT (7), and ||U_c||_2."""

    alpha: Float[Tensor, " steps"]
    beta: Float[Tensor, " steps"]
    candidate_norm: Float[Tensor, ""]

    @property
    def norm(self) -> Float[Tensor, " steps"]:
        """alpha_t + beta_t ||U_c||_2, the right side of CRT (5)."""
        return self.alpha + self.beta * self.candidate_norm


@torch.no_grad()
def step_bound(cell: GRUCell, x: Float[Tensor, "steps D"], h: Float[Tensor, "steps H"]) -> StepBound:
    """Bound ||dh_t/dh_{t-1}||_2 at each step, given its gates, by CRT (6)-(9).

        alpha = delta_u (max |h_{t-1}| + max |c_t|) ||U_u|| + max(1 - u_t)      delta_u = max(u_t (1 - u_t))
        beta  = max(u_t) (delta_r ||U_r|| max |h_{t-1}| + max(r_t))             delta_r = max(r_t (1 - r_t))

    each maximum over the channels. The derivative of CRT (4) is

        diag(1 - u) + diag((c - h) u (1 - u)) U_u + diag(u (1 - c^2)) U_c (diag(r) + diag(h r (1 - r)) U_r)

    and |c - h| <= max |h| + max |c| and 1 - c^2 <= 1 give the bound. (The paper writes max h and max c; they can be
    negative, and then its inequality does not hold.)

    h is the state before each step. Use float64 if rounding must not break the bound.
    """
    reset, update, candidate = cell.gates(cell.project(x), h, cell.recurrent_weights(x.dtype))
    largest_state, largest_candidate = h.abs().amax(-1), candidate.abs().amax(-1)
    reset_norm, update_norm, candidate_norm = _recurrent_norms(cell)
    alpha = _slope(update) * (largest_state + largest_candidate) * update_norm + (1 - update).amax(-1)
    beta = update.amax(-1) * (_slope(reset) * reset_norm * largest_state + reset.amax(-1))
    return StepBound(alpha, beta, candidate_norm)


@torch.no_grad()
def a_priori_step_bound(cell: GRUCell) -> Float[Tensor, ""]:
    """Bound alpha + beta ||U_c||_2 for all inputs, given only the weights (CRT Lemma 2, CRT (10)).

    (||U_u|| / 2 + 1) + (||U_r|| / 4 + 1) ||U_c||, for states within [-1, 1]; a chain that starts there stays there.
    """
    reset_norm, update_norm, candidate_norm = _recurrent_norms(cell)
    return update_norm / 2 + 1 + (reset_norm / 4 + 1) * candidate_norm


def _recurrent_norms(cell: GRUCell) -> list[Float[Tensor, ""]]:
    return [torch.linalg.matrix_norm(row.recurrent, ord=2) for row in (cell.reset, cell.update, cell.candidate)]


def _log10_products(factors: Float[Tensor, " steps"]) -> Float[Tensor, " steps"]:
    """For each step, return log10 of the product of all later steps' factors, which can exceed float64."""
    return _of_later_steps(factors.log10().flip(0).cumsum(0).flip(0), nothing=0.0)


def _log10_powers(factors: Float[Tensor, " steps"]) -> Float[Tensor, " steps"]:
    """For each step, return log10 of the largest later factor to the power of their number, as CRT (2) writes it."""
    largest = _of_later_steps(factors.flip(0).cummax(0).values.flip(0), nothing=1.0)
    n_later = torch.arange(len(factors) - 1, -1, -1, dtype=factors.dtype, device=factors.device)
    return n_later * largest.log10()


def _slope(gate: Tensor) -> Tensor:
    return (gate * (1 - gate)).amax(-1)


def _of_later_steps(values: Tensor, nothing: float) -> Tensor:
    return torch.cat([values[1:], values.new_full((1,), nothing)])


@dataclass(frozen=True, eq=False)
class StepGradients:
    """The memory RNN's T steps over the outputs of all segments except the last; float64, on the CPU."""

    norms: Float[Tensor, " T"]  # ||dh_t/dh_{t-1}||_2, measured
    input_norms: Float[Tensor, " T"]  # ||dh_t/dy_t||_2, measured
    alpha: Float[Tensor, " T"]  # alpha_t, CRT (6)
    beta: Float[Tensor, " T"]  # beta_t, CRT (7)
    candidate_norm: float  # ||U_c||_2
    bound_a_priori: float  # the bound on `bounds` given only the weights, CRT (10)

    @property
    def bounds(self) -> Float[Tensor, " T"]:
        """alpha_t + beta_t ||U_c||_2, the bound on `norms`, CRT (5)."""
        return self.alpha + self.beta * self.candidate_norm


@dataclass(frozen=True, eq=False)
class GradientFlow:
    """Spectral norms between outputs of different segments, and log10 of their bounds; float64, on the CPU.

    The T sources are all outputs of the segments before the last, and the K targets are chosen outputs of the last one.
    `direct` is the product of CRT Theorem 3. Positions count from 0 at the first token measured.
    """

    segment_length: int  # tokens of a segment
    sources: Int[Tensor, " T"]  # the position i of each y_i
    targets: Int[Tensor, " K"]  # the position k of each y_k
    total: Float[Tensor, "K T"]  # ||dy_k/dy_i||_2 along all paths
    direct: Float[Tensor, "K T"]
    """||dy_k/dy_i||_2 along the memory RNN alone, with the outputs in between fixed: the product of CRT (12)."""
    log10_bound: Float[Tensor, "K T"]
    """Bound on `direct`: ||dy_k/dm|| ||dh_i/dy_i|| times alpha_t + beta_t ||U_c|| of every later step."""
    log10_bound_of_largest: Float[Tensor, "K T"]
    """The same with the largest of these factors in place of each: a power, as in CRT (2)."""
    log10_bound_a_priori: Float[Tensor, "K T"]  # the same with the bound on a factor given only the weights, CRT (10)
    log10_bound_measured: Float[Tensor, "K T"]
    """The same with each step's measured norm: the smallest bound that step-by-step bounds can give."""
    memory_norms: Float[Tensor, " K"]  # ||dy_k/dm||_2
    steps: StepGradients  # the memory RNN's steps; step t computes h_t
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
) -> GradientFlow:
    """Measure how the outputs of the last segment depend on those of earlier segments (CRT (2)-(3), CRT (12)-(14)).

    A copy of the model runs on the CPU in float64 and in evaluation mode. The Jacobians, d_model by d_model, are exact:
    they come from reverse-mode differentiation with many vectors at once. Norms are the largest of all singular values.

    Args:
        model: a `CompactRecurrentTransformer` with a memory; it is left unchanged.
        tokens: one stream of at least two whole segments.
        state: the state of the stream before them, at the end of a segment; None starts a stream.
        at: the targets, by position in the last segment; negative positions count from its end.

    Raises:
        ValueError: the model has no memory vector, or the tokens, the state or a target do not fit its segments.
    """
    cell = memory_rnn(model).cell
    assert isinstance(model, CompactRecurrentTransformer)
    n = model.config.segment_length
    expected = f"one or more positions in a segment of {n} tokens, {-n} to {n - 1}"
    require(bool(at) and all(-n <= position < n for position in at), "at", list(at), expected)
    targets = [position % n for position in at]
    trace = _trace_memory(model, tokens, state)
    memory, last = trace.memories[-1][0], trace.outputs[-1][0]
    from_memory = torch.stack([_jacobians(last[k], [trace.memories[-1]])[0].flatten(1) for k in targets])
    by_all_paths = torch.cat(_jacobians(memory, trace.outputs[:-1]), 2)[:, 0]
    steps = _step_gradients(trace)
    memory_norms = torch.linalg.matrix_norm(from_memory, ord=2)
    ends = memory_norms.log10()[:, None] + steps.input_norms.log10()
    # along the RNN, the other outputs are fixed: it reads all of them as if they were data; last, for it is traced
    y = torch.cat(trace.outputs[:-1], 1).detach().requires_grad_()
    _, after = trace.rnn(y, RNNState(trace.memories[0].detach()))
    along_rnn = _jacobians(after.h[0], [y])[0][:, 0]
    n_sources = len(steps.norms)
    return GradientFlow(
        segment_length=n,
        sources=torch.arange(n_sources),
        targets=torch.tensor(targets) + n_sources,
        total=_chained_norms(from_memory, by_all_paths),
        direct=_chained_norms(from_memory, along_rnn),
        log10_bound=ends + _log10_products(steps.bounds),
        log10_bound_of_largest=ends + _log10_powers(steps.bounds),
        log10_bound_a_priori=ends + _log10_powers(torch.full_like(steps.norms, steps.bound_a_priori)),
        log10_bound_measured=ends + _log10_products(steps.norms),
        memory_norms=memory_norms,
        steps=steps,
        orthogonality_error=float(cell.orthogonality_error()) if isinstance(cell, NCGRUCell) else None,
    )


def _chained_norms(from_memory: Float[Tensor, "K d d"], into_memory: Float[Tensor, "d T d"]) -> Float[Tensor, "K T"]:
    sources = into_memory.transpose(0, 1)
    return torch.stack([torch.linalg.matrix_norm(of_target @ sources, ord=2) for of_target in from_memory])


def _step_gradients(trace: _MemoryTrace) -> StepGradients:
    cell = trace.rnn.cell
    y = torch.cat(trace.outputs[:-1], 1)[0].detach().requires_grad_()
    h = torch.cat([trace.memories[0][:, None], *trace.states[:-1]], 1)[0, :-1].detach().requires_grad_()
    after = cell.step(cell.project(y), h, cell.recurrent_weights(y.dtype))
    by_state, by_input = _step_jacobians(after, [h, y])
    bound = step_bound(cell, y, h)
    return StepGradients(
        norms=torch.linalg.matrix_norm(by_state, ord=2),
        input_norms=torch.linalg.matrix_norm(by_input, ord=2),
        alpha=bound.alpha,
        beta=bound.beta,
        candidate_norm=float(bound.candidate_norm),
        bound_a_priori=float(a_priori_step_bound(cell)),
    )
