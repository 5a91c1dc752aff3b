"""What a segment costs, counted by running it on tensors without values: nothing is computed, no weight allocated.

Counted are FLOPs, 2 for a multiply-add, of whatever `torch.utils.flop_counter` has a formula for: products of matrices,
attention (each query with all keys of its window, those masked as the future too), and this library's own operators,
for every step and channel: `recurra::linear_scan` with 2, be they complex or real, and `recurra::gate_loop_fused` with
9 for complex gates and 4 for real ones.

Not counted:

- whatever works element by element: activations, norms, the softmax's exponentials, gates, lerp, and, for GateLoop with
  d_h > 1, k^T v and q h around its scan;
- the products that turn NCGRU's skew-symmetric A into U_c: they depend on the weights alone, not on the segment. The
  module makes them once a call, or once in all inside of `torch.nn.utils.parametrize.cached()`;
- the scans, where Numba is missing and plain torch takes the operators' place, step by step.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from recurra.evaluation.evaluate import evaluation_mode
from recurra.state import n_bytes

VOCABULARY_PARTS = ("embedding", "head")
"""The children of a language model whose cost depends on the vocabulary; the rest are its blocks."""


class MeasuredCost(NamedTuple):
    """One forward of one segment, batch 1, in evaluation mode, without gradients, going on from a full state.

    block_flops: of everything but embedding and head; comparable with `recurra.analysis.formulas`.
    vocabulary_flops: of embedding (its projections, where it has some) and head (the softmax's logits).
    block_parameters: in everything but embedding and head.
    parameters: in all; a tensor that several modules share counts once.
    state_bytes: what is carried from one segment to the next, once it grows no more.
    """

    block_flops: int
    vocabulary_flops: int
    block_parameters: int
    parameters: int
    state_bytes: int


def measured_cost(model: nn.Module, segment_length: int) -> MeasuredCost:
    """Count what a model does for a segment of `segment_length` tokens, after as many as it takes to fill its state.

    Args:
        model: a language model `(tokens, state) -> (logits, state)` with an `embedding` and a `head`, on any device: a
            model made under `torch.device("meta")` costs no memory. Afterwards it is as before.
        segment_length: tokens; for a model that reads segments, the length of its own.

    Raises:
        ValueError: `segment_length` is below 1, or the model reads segments of another length.
        TypeError: the model has no embedding or no head.
    """
    own_length = getattr(getattr(model, "config", None), "segment_length", segment_length)
    if segment_length < 1 or segment_length != own_length:
        expected = "at least 1" if segment_length < 1 else f"{own_length}, the tokens of the model's segments"
        raise ValueError(f"segment_length is {segment_length}; expected {expected}")
    children = dict(model.named_children())
    if missing := [name for name in VOCABULARY_PARTS if name not in children]:
        raise TypeError(
            f"{type(model).__name__} has no {' and no '.join(missing)}; the model must have an embedding and a head"
        )
    of_vocabulary = {id(tensor) for name in VOCABULARY_PARTS for tensor in children[name].parameters()}
    flops, state_bytes = _count(model, segment_length)
    root = type(model).__name__
    total = sum(flops["Global"].values())
    vocabulary = sum(sum(flops.get(f"{root}.{name}", {}).values()) for name in VOCABULARY_PARTS)
    return MeasuredCost(
        block_flops=total - vocabulary,
        vocabulary_flops=vocabulary,
        block_parameters=sum(tensor.numel() for tensor in model.parameters() if id(tensor) not in of_vocabulary),
        parameters=sum(tensor.numel() for tensor in model.parameters()),
        state_bytes=state_bytes,
    )


def _count(model: nn.Module, segment_length: int) -> tuple[dict[str, dict[Any, int]], int]:
    """FLOPs by module and operator of a segment in the middle of a stream, and the bytes of the state it leaves."""
    counter = FlopCounterMode(display=False)
    with (
        evaluation_mode(model),
        torch.no_grad(),
        FakeTensorMode(),
        _AnyToken(),
        # As products of matrices: torch has no formula for its CPU's fused attention, which would count as nothing.
        sdpa_kernel(SDPBackend.MATH),
        parametrize.cached(),
    ):
        weights = dict(_without_values(model))
        tokens = torch.zeros(1, segment_length, dtype=torch.int64, device="cpu")

        def read_segment(state: Any) -> Any:
            return functional_call(model, weights, (tokens, state), tie_weights=False)[1]

        state: Any = None
        size = -1
        while size != n_bytes(state):
            size = n_bytes(state)
            state = read_segment(state)
        with counter:
            state = read_segment(state)
    return counter.get_flop_counts(), n_bytes(state)


def _without_values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors for every place of a module that holds one, each place once: `functional_call` forgets what stood in a
    place that it fills by two names, as those of a shared list of tables.

    They are on the CPU, wherever the model is: there the scans run as operators, and only of these there are formulas.
    """
    for prefix, module in model.named_modules():
        own = chain(
            module.named_parameters(recurse=False, remove_duplicate=False),
            module.named_buffers(recurse=False, remove_duplicate=False),
        )
        for name, tensor in own:
            yield f"{prefix}.{name}".lstrip("."), torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


class _AnyToken(TorchDispatchMode):
    """Answers 0 where a whole number is read out of a tensor without values.

    The models look at the tokens' range, to refuse what is not in their vocabulary; any token stands for all here.
    Other values stay without an answer, and asking for one is an error: what a model does must not depend on them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.int64:
            return 0
        return func(*args, **(kwargs or {}))
