"""States of copies prepared for decoding: optional integer storage, and attention as one recorded instruction."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from recurra._choices import KVCacheNumbers, StateNumbers
from recurra.checks import require, require_literal
from recurra.decoding._windows import Attention
from recurra.layers.attention import append_to_cache, trim_cache
from recurra.layers.quantization import dequantized, quantized, quantized_size
from recurra.mixers.base import Dim, Mixer
from recurra.mixers.mla import MultiHeadLatentAttention, MultiHeadLatentAttentionState
from recurra.mixers.rotary_attention import RotaryAttention, RotaryAttentionState


def _recording() -> tuple[Any, AbstractContextManager]:
    """Return the memory of the step being recorded, or None, and a context that suspends recording."""
    modes = _get_current_dispatch_mode_stack()
    memory = getattr(modes[-1], "memory", None) if modes else None
    return memory, nullcontext() if memory is None else _disable_current_modes()


def _attend(
    mixer: RotaryAttention, queries: Tensor, keys: Tensor, values: Tensor, state: RotaryAttentionState
) -> tuple[Tensor, RotaryAttentionState]:
    """Attend as the mixer does; while a step is recorded, record attention as a single instruction."""
    memory, unrecorded = _recording()
    if queries.shape[1] != 1 or memory is None:
        return type(mixer).attend(mixer, queries, keys, values, state)
    with unrecorded:
        y, after = type(mixer).attend(mixer, queries, keys, values, state)
        scale, most = mixer.query_scale * mixer.d_head**-0.5, mixer.state_layout.keys.shape[0].most
        kind = Attention(mixer.n_rotated, mixer.rotation_base, scale, most)
        memory.attend(y, after, queries, keys, values, state, kind)
    return y, after


def _attend_to_latents(
    mixer: MultiHeadLatentAttention,
    absorbing: Tensor,
    queries: Tensor,
    new: MultiHeadLatentAttentionState,
    state: MultiHeadLatentAttentionState,
) -> tuple[Tensor, MultiHeadLatentAttentionState]:
    """Like `_attend`, but a step has one vector, its shared key and latent, as key and value of all heads.

    absorbing: W_k of each head, (H, d_latent, d_head), in a layout that all compiled steps can read.
    """
    memory, unrecorded = _recording()
    if queries.shape[1] != 1 or memory is None:
        return type(mixer).attend(mixer, queries, new, state)
    queries, positioned = queries.split([mixer.d_head, mixer.d_shared], -1)
    queries = torch.cat([positioned, torch.einsum("blhd,hcd->blhc", queries, absorbing)], -1)
    both = torch.cat([new.shared_keys, new.latents], -1)[:, :, None]
    with unrecorded:
        y, after = torch.zeros_like(queries), trim_cache(append_to_cache(state, new), mixer.window)  # any numbers do
        base, scale = mixer.rotation_base, (mixer.d_head + mixer.d_shared) ** -0.5
        n_rotated = 0 if base is None else mixer.d_shared
        kind = Attention(n_rotated, base or 1.0, scale, mixer.state_layout.latents.shape[0].most)
        memory.attend(y, after, queries, both, both, state, kind)
    return mixer.values_of(y[..., mixer.d_shared :]), after


def _mix(
    mixer: Mixer, shapes: dict[str, tuple[int, ...]], x: Tensor, state: Any, mask: Tensor | None, **shared: Any
) -> tuple[Tensor, Any]:
    """Mix as the mixer does, but read and return the state's matrices (of `shapes`) in int16."""
    if state is not None:
        memory, unrecorded = _recording()
        with unrecorded:
            plain = {
                name: dequantized(getattr(state, name), shape[1] * shape[2]).unflatten(-1, shape[1:])
                for name, shape in shapes.items()
            }
            for name in shapes if memory is not None else ():
                memory.decode(plain[name], getattr(state, name))
        state = state._replace(**plain)
    y, after = type(mixer).mix(mixer, x, state, mask, **shared)
    memory, unrecorded = _recording()
    with unrecorded:
        codes = {name: quantized(getattr(after, name).flatten(-2), torch.int16) for name in shapes}
        for name in shapes if memory is not None else ():
            memory.encode(getattr(after, name), codes[name])
    return y, after._replace(**codes)


def prepare_states(model: nn.Module, kv_cache_dtype: str, state_dtype: str) -> None:
    """Make a decoding copy store states in these types, and its attention one instruction of compiled steps."""
    require_literal(KVCacheNumbers, kv_cache_dtype=kv_cache_dtype)
    require_literal(StateNumbers, state_dtype=state_dtype)
    mixers = [part for part in model.modules() if isinstance(part, Mixer)]
    attentions = [mixer for mixer in mixers if isinstance(mixer, RotaryAttention)]
    for attention in attentions:
        attention.attend = partial(_attend, attention)  # type: ignore[method-assign]
    for mixer in mixers:
        if isinstance(mixer, MultiHeadLatentAttention):
            absorbing = mixer.expansions()[0].detach().transpose(1, 2).contiguous()
            mixer.attend = partial(_attend_to_latents, mixer, absorbing)  # type: ignore[method-assign]
    expected = "float32 for a model without rotary attention"
    require(bool(attentions) or kv_cache_dtype == "float32", "kv_cache_dtype", kv_cache_dtype, expected)
    if kv_cache_dtype == "int8":
        for mixer in mixers:
            if isinstance(getattr(mixer, "attention", mixer), RotaryAttention):
                _set_codes(mixer, ("keys", "values"), torch.int8)
    inner = {part for mixer in mixers for part in mixer.modules() if part is not mixer}
    matrices = {mixer: names for mixer in mixers if mixer not in inner and (names := _matrices(mixer))}
    expected = "float32 for a model without matrices as states"
    require(bool(matrices) or state_dtype == "float32", "state_dtype", state_dtype, expected)
    for mixer, names in matrices.items() if state_dtype == "int16" else ():
        shapes = {name: getattr(mixer.state_layout, name).shape for name in names}
        _set_codes(mixer, names, torch.int16, n_dims=2)
        mixer.mix = partial(_mix, mixer, shapes)  # type: ignore[method-assign]


def _matrices(mixer: Mixer) -> tuple[str, ...]:
    """Return the names of state tensors that are one real matrix per head."""
    return tuple(
        name
        for name, spec in mixer.state_layout._asdict().items()
        if name == "h"
        and len(spec.shape) == 3
        and not spec.is_complex
        and not any(isinstance(size, Dim) for size in spec.shape)
    )


def _set_codes(mixer: Mixer, names: tuple[str, ...], codes: torch.dtype, n_dims: int = 1) -> None:
    """Replace the last dimensions of state tensors by vectors of integer codes, each with one scale."""
    specs = {name: getattr(mixer.state_layout, name) for name in names}
    for name, spec in specs.items():
        shape = (*spec.shape[:-n_dims], quantized_size(prod(spec.shape[-n_dims:]), codes))
        specs[name] = spec._replace(shape=shape, codes=codes)
    mixer.state_layout = mixer.state_layout._replace(**specs)
