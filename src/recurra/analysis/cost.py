"""The cost of a segment, measured by running it on tensors without values: no arithmetic, no memory for weights.

FLOPs are counted, 2 for a multiply-add, wherever `torch.utils.flop_counter` has a formula: matrix products, attention
(each query with all keys of its window, including masked future ones), and this library's own operators, for each step
and channel: 2 for `recurra::linear_scan`, real or complex, and for `recurra::gate_loop_fused` 9 with complex
transitions and 4 with real ones (10 for `recurra::gate_loop_complex`, whose outputs are complex too).

Not counted are elementwise operations; the products that turn NCGRU's skew-symmetric A into U_c, which depend only on
the weights; and scans without Numba, which run step by step in plain torch instead of as operators.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from recurra.checks import kind_of, require, require_at_least, sentence
from recurra.models.shell import evaluation_mode
from recurra.state import n_bytes

_VOCABULARY_PARTS = ("embedding", "head")
"""The children of a language model whose cost depends on the vocabulary; the others are its blocks."""
_OF_WEIGHTS = ("recurra.neumann_inverse",)
"""Operators that depend only on the weights."""


class MeasuredCost(NamedTuple):
    """The cost of one forward over one segment from a full state: batch 1, in evaluation mode, without gradients."""

    block_flops: int  # of everything except embedding and head
    vocabulary_flops: int  # of embedding (its projections, if any) and head (the softmax's logits)
    block_parameters: int
    parameters: int  # of the whole model; a tensor shared by several modules counts once
    state_bytes: int  # carried between segments, once it no longer grows


def measured_cost(model: nn.Module, segment_length: int) -> MeasuredCost:
    """Count a model's FLOPs, parameters and state for a segment of `segment_length` tokens, after its state is full.

    Args:
        model: a language model `(tokens, state) -> (logits, state)` with an `embedding` and a `head`, on any device: a
            model made under `torch.device("meta")` costs no memory. It is left unchanged.
        segment_length: in tokens; if the model reads segments, the length of those.

    Raises:
        ValueError: `segment_length` is below 1, or the model reads segments of another length.
        TypeError: the model has no embedding or no head.
    """
    own_length = getattr(getattr(model, "config", None), "segment_length", segment_length)
    require_at_least(1, segment_length=segment_length)
    fits = segment_length == own_length
    require(fits, "segment_length", segment_length, f"{own_length}, the length of the model's segments")
    children = dict(model.named_children())
    if missing := [name for name in _VOCABULARY_PARTS if name not in children]:
        got = f"{kind_of(model)} without {' and '.join(missing)}"
        raise TypeError(sentence("model", got, "a language model with an embedding and a head"))
    of_vocabulary = {id(tensor) for name in _VOCABULARY_PARTS for tensor in children[name].parameters()}
    flops, state_bytes = _count(model, segment_length)
    root = type(model).__name__
    total = sum(n for operator, n in flops["Global"].items() if str(operator) not in _OF_WEIGHTS)
    vocabulary = sum(sum(flops.get(f"{root}.{name}", {}).values()) for name in _VOCABULARY_PARTS)
    return MeasuredCost(
        block_flops=total - vocabulary,
        vocabulary_flops=vocabulary,
        block_parameters=sum(tensor.numel() for tensor in model.parameters() if id(tensor) not in of_vocabulary),
        parameters=sum(tensor.numel() for tensor in model.parameters()),
        state_bytes=state_bytes,
    )


_MOST_SEGMENTS = 1000
"""Read at most, to find what a model carries."""


def _count(model: nn.Module, segment_length: int) -> tuple[dict[str, dict[Any, int]], int]:
    """FLOPs of a segment in the middle of a stream by module and operator, and the bytes of the state after it."""
    with (
        evaluation_mode(model),
        torch.no_grad(),
        FakeTensorMode(),
        _AnyToken(),
        # As matrix products: torch has no formula for its fused CPU attention, which would count as 0.
        sdpa_kernel(SDPBackend.MATH),
    ):
        weights = dict(_without_values(model))
        tokens = torch.zeros(1, segment_length, dtype=torch.int64, device="cpu")

        def read_segment(state: Any) -> Any:
            return functional_call(model, weights, (tokens, state), tie_weights=False)[1]

        state: Any = read_segment(None)  # not counted: it hands over the formulas of this library's operators
        sizes: list[int] = []
        while (size := n_bytes(state)) not in sizes:  # until it stays, or comes again within the segments of a model
            if len(sizes) == _MOST_SEGMENTS:
                got = f"a {type(model).__name__} whose state still grows after {_MOST_SEGMENTS:,} segments"
                raise ValueError(
                    sentence("model", got, "one whose state stops growing", "pass a longer segment_length")
                )
            sizes.append(size)
            with FlopCounterMode(display=False) as counter:
                state = read_segment(state)
    return counter.get_flop_counts(), size


def _without_values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield an empty tensor for each parameter and buffer, once per place that holds one: `functional_call` loses the
    original of a place that it fills under two names. They are on the CPU, where scans run as operators."""
    for prefix, module in model.named_modules():
        own = chain(
            module.named_parameters(recurse=False, remove_duplicate=False),
            module.named_buffers(recurse=False, remove_duplicate=False),
        )
        for name, tensor in own:
            yield f"{prefix}.{name}".lstrip("."), torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


class _AnyToken(TorchDispatchMode):
    """Returns 0 when an integer is read from a tensor without values: models check the range of their tokens."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.int64:
            return 0
        return func(*args, **(kwargs or {}))


# CRT Table 1 counts one forward over a segment of n tokens for a model of L layers and d channels, without embedding
# and softmax, and omits terms of order n d. Its rows count differently. We read them as follows:
#
# - Transformer, 20 n d^2 per layer: 10 d^2 weights (four projections, two products for the relative positions, a
#   feed-forward network 2 d wide) at 2 FLOPs for a multiply-add. 6 n^2 d: scores of content, of position, and values.
# - Transformer-XL, 28 n d^2: keys, values and positions (four of the ten) for 2 n tokens; 12 n^2 d and 6 n^2 likewise.
# - CRT, 12 n d^2 per layer for 8 d^2 weights, and 12 n d^2 for the 12 d^2 weights of its two RNNs. At 2 FLOPs for each
#   multiply-add these would be 16 and 24, so this row cannot be compared with the other two.


class PublishedCost(NamedTuple):
    """A row of CRT Table 1: FLOPs of one forward over a segment as the paper counts them; parameters without embedding
    and softmax."""

    flops: int
    parameters: int


def _transformer(n_layer: int, segment_length: int, d_model: int) -> PublishedCost:
    n, d = segment_length, d_model
    return PublishedCost(n_layer * (20 * n * d**2 + 6 * n**2 * d), n_layer * (10 * d**2 + 6 * d))


def _transformer_xl(n_layer: int, segment_length: int, d_model: int) -> PublishedCost:
    # with a memory as long as a segment
    n, d = segment_length, d_model
    flops = n_layer * (28 * n * d**2 + 12 * n**2 * d + 6 * n**2)
    return PublishedCost(flops, _transformer(n_layer, n, d).parameters)


def _crt_gru(n_layer: int, segment_length: int, d_model: int) -> PublishedCost:
    n, d = segment_length, d_model
    return PublishedCost(
        n * d**2 * (12 * n_layer + 12) + 8 * n_layer * n**2 * d, (12 + 8 * n_layer) * d**2 + (6 + 4 * n_layer) * d
    )


_FORMULAS: dict[str, Callable[[int, int, int], PublishedCost]] = {
    "Transformer": _transformer,
    "Transformer-XL": _transformer_xl,
    "CRT-GRU": _crt_gru,
    # The table has no row for it. A step takes the same products; U_c has half as many free parameters.
    "CRT-NCGRU": _crt_gru,
}
"""The formulas by kind of model: of (layers, tokens of a segment, channels)."""


def model_kind(model: nn.Module) -> str:
    """Return a model's name in the paper's tables, or a descriptive one."""
    return str(getattr(model, "kind", type(model).__name__))


def published_cost(model: nn.Module) -> PublishedCost | None:
    """Return Table 1's numbers for a model, with its own layers, segments and channels; None if no row fits it."""
    row, config = getattr(model, "published_row", None), getattr(model, "config", None)
    if row not in _FORMULAS or config is None:
        return None
    return _FORMULAS[row](config.n_layer, config.segment_length, config.d_model)
