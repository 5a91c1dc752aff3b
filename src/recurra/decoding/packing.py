"""A copy of a model for decoding: its linear layers, experts and cells packed."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from recurra._choices import Numbers
from recurra.checks import require_literal, sentence
from recurra.decoding._states import prepare_states
from recurra.decoding.linear import DecodingExperts, DecodingLinear, _linear
from recurra.layers.experts import Experts
from recurra.layers.feed_forward import TiedLinear
from recurra.layers.transition import DataTransition
from recurra.mixers.gru import GRU, GRUState
from recurra.mixers.rnn import RNN, RNNState
from recurra.mixers.slstm import SLSTM
from recurra.models.shell import acts_on_calls
from recurra.ops.cells.gru import Gates, GRUCell, RecurrentWeights, gru_after_products, gru_sequence_reference
from recurra.ops.cells.orthogonal import NCGRUCell
from recurra.ops.cells.slstm import SLSTMParts, slstm_after_products


class _GRUProducts(nn.Module):
    """The two products of a `torch.nn.GRUCell`, packed, under the names that the cell has for its weights."""

    def __init__(self, cell: nn.GRUCell, dtype: str) -> None:
        super().__init__()
        self.of_x = DecodingLinear(_linear(cell.weight_ih, cell.bias_ih), dtype)
        self.of_h = DecodingLinear(_linear(cell.weight_hh, cell.bias_hh), dtype)

    weight_ih, bias_ih = property(lambda self: self.of_x.weight), property(lambda self: self.of_x.bias)
    weight_hh, bias_hh = property(lambda self: self.of_h.weight), property(lambda self: self.of_h.bias)


class _PackedGRU(GRU):
    """The mixer "gru" with packed products: that with the state, too, in every step of a sequence of any length."""

    cell: Any

    def __init__(self, mixer: GRU, dtype: str) -> None:
        with torch.device("meta"):  # the cell is replaced
            super().__init__(mixer.d_model)
        self.cell = _GRUProducts(mixer.cell, dtype)

    def mix(self, x: Tensor, state: GRUState, mask: None) -> tuple[Tensor, GRUState]:
        y, last = gru_after_products(self.cell.of_x(x), state.h, self.cell.of_h)
        return y, GRUState(last)


class _PackedSLSTM(SLSTM):
    """The mixer "slstm" with packed products, those of each head's R, too."""

    input_weights: Any
    recurrent_weights = property(lambda self: torch.stack([head.weight.t() for head in self.heads]))

    def __init__(self, mixer: SLSTM, dtype: str) -> None:
        with torch.device("meta"):  # all weights are replaced
            super().__init__(mixer.d_model, n_heads=mixer.n_heads)
        del self._parameters["recurrent_weights"]
        self.input_weights, self.norm_weight = DecodingLinear(mixer.input_weights, dtype), mixer.norm_weight
        self.heads = nn.ModuleList(DecodingLinear(_linear(weight.t()), dtype) for weight in mixer.recurrent_weights)

    def _sequence(self, projected: Tensor, parts: SLSTMParts) -> tuple[Tensor, SLSTMParts]:
        return slstm_after_products(projected, parts, self._add_product)

    def _add_product(self, inputs: Tensor, h: Tensor) -> Tensor:
        return inputs + torch.stack([head(part) for head, part in zip(self.heads, h.unbind(0))])


class _PackedCell(GRUCell):
    """CRT's cells with packed products. NCGRU's orthogonal U_c is int8 at least: int8 and bfloat16 move its singular
    values by 0.3%, int4 by a third.
    """

    input_weight, bias = property(lambda self: self.of_x.weight), property(lambda self: self.of_x.bias)
    gate_weight = property(lambda self: self.of_gates.weight)
    candidate_weight = property(lambda self: self.of_candidate.weight)

    def __init__(self, cell: GRUCell, dtype: str) -> None:
        with torch.device("meta"):  # all weights are replaced
            super().__init__(cell.input_size, cell.hidden_size)
        self._parameters.clear()
        gates, candidate = cell.recurrent_weights()
        rounded = "int8" if dtype == "int4" and isinstance(cell, NCGRUCell) else dtype
        self.of_x = DecodingLinear(_linear(cell.input_weight, cell.bias), dtype)
        self.of_gates = DecodingLinear(_linear(gates), dtype)
        self.of_candidate = DecodingLinear(_linear(candidate), rounded)

    def project(self, x: Tensor) -> Tensor:
        """Compute W x + b."""
        return self.of_x(x)

    def recurrent_weights(self, dtype: torch.dtype | None = None) -> RecurrentWeights:
        """Return the packed matrices, which `gates` multiplies by."""
        return RecurrentWeights(self.of_gates.stored, self.of_candidate.stored)

    def gates(self, projected: Tensor, h: Tensor, weights: RecurrentWeights) -> Gates:
        """Compute r, u and c of one step."""
        of_gates, of_candidate = projected.split([2 * self.hidden_size, self.hidden_size], -1)
        r, u = (of_gates + self.of_gates(h)).sigmoid().chunk(2, -1)
        return Gates(r, u, (of_candidate + self.of_candidate(r * h)).tanh())


class _PackedRNN(RNN):
    """The RNN of CRT's memory or positions with a packed cell."""

    def __init__(self, rnn: RNN, dtype: str) -> None:
        super().__init__(_PackedCell(rnn.cell, dtype))

    def mix(
        self, x: Tensor, state: RNNState, mask: None, weights: RecurrentWeights | None = None
    ) -> tuple[Tensor, RNNState]:
        cell = self.cell
        h = cell.entering(state.h, x.shape[0])
        y, last = gru_sequence_reference(cell, cell.project(x), h, cell.recurrent_weights())
        return y, RNNState(last)


_PACKED: dict[type[nn.Module], Callable[..., nn.Module]] = {GRU: _PackedGRU, SLSTM: _PackedSLSTM, RNN: _PackedRNN}
"""Mixers that multiply their state by matrices; in float32 they have kernels."""


_Model = TypeVar("_Model", bound=nn.Module)


def pack_linear_layers(
    model: _Model,
    dtype: str = "float32",
    *,
    kv_cache_dtype: str = "float32",
    state_dtype: str = "float32",
    in_place: bool = False,
) -> _Model:
    """Copy `model`, in evaluation mode, with a `DecodingLinear` in place of each `nn.Linear`.

    The copy takes the same arguments and has the same states. A head that is the embedding is packed too, and so are
    the products with the state of the mixers "gru" and "slstm" and of CRT's cells, and experts, but not their routers.
    Everything else (embeddings, norms, implicit filters, the clusters of an adaptive softmax) is float32, and shares
    its memory with the model if that is float32 too. With "int4", projections to gates and the orthogonal matrix of
    CRT's NCGRU become int8.

    Args:
        model: a model on the CPU, in float32 or bfloat16.
        dtype: how to store weights: "float32", "bfloat16", "int8" or "int4".
        kv_cache_dtype, state_dtype: how states hold keys and values, and matrices (see `prepare`).
        in_place: pack the model itself, and free the weights of each layer before the next is packed.

    Raises:
        ValueError: there is no such dtype; or a layer has an adapter, a hook or a replaced `forward` (pruning, weight
            norm of the older kind), which would be dropped or made permanent.
    """
    require_literal(Numbers, dtype=dtype)
    _require_plain(model, dtype)
    # A memo that maps each tensor to itself keeps deepcopy from copying them.
    shared = {} if in_place else {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = model if in_place else copy.deepcopy(model, memo=shared)
    packed: dict[nn.Module, nn.Module] = {}  # by layer: one that several modules have stays one
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear or type(child) is TiedLinear:
                # |a| near 1 decides how long a memory lasts: in int4, one such matrix costs as much as all others
                rounded = "int8" if dtype == "int4" and isinstance(parent, DataTransition) else dtype
                packed[child] = packed.get(child) or DecodingLinear(child, rounded)
                setattr(parent, name, packed[child])
                if in_place:
                    child._parameters.clear()
            elif type(child) is Experts:
                setattr(parent, name, DecodingExperts(child, dtype))
            elif dtype != "float32" and type(child) in _PACKED:
                setattr(parent, name, _PACKED[type(child)](child, dtype))
    _to_float32(twin)
    prepare_states(twin, kv_cache_dtype, state_dtype)
    return twin.eval()


def _require_plain(model: nn.Module, dtype: str) -> None:
    """Refuse what acts on the calls of modules that packed ones replace."""
    replaced = {nn.Linear, TiedLinear, Experts, *(_PACKED if dtype != "float32" else ())}
    for name, module in model.named_modules():
        if type(module).__module__.partition(".")[0] == "peft":
            got = f"one with an adapter, the {type(module).__name__} {name}"
            raise ValueError(sentence("model", got, "one without", "call merge_and_unload first"))
        if type(module) in replaced and acts_on_calls(module):
            got = f"one with a hook or another forward on the {type(module).__name__} {name}".rstrip()
            hint = "remove it, or make it permanent (as torch.nn.utils.prune.remove does)"
            raise ValueError(sentence("model", got, "one without", hint))


def _to_float32(model: nn.Module) -> None:
    """Replace the other bfloat16 tensors of a packed model, shared with the original, by float32 copies."""
    for module in (part for part in model.modules() if not isinstance(part, (DecodingLinear, DecodingExperts))):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype == torch.bfloat16:
                setattr(module, name, nn.Parameter(parameter.detach().float(), requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype == torch.bfloat16:
                setattr(module, name, buffer.float())


def exact_modules(model: nn.Module) -> set[nn.Module]:
    """Find small modules whose weights must not be rounded, because the model amplifies their rounding errors."""
    exact = [module for module in model.modules() if getattr(module, "needs_exact_weights", False)]
    return {part for module in exact for part in module.modules()}
