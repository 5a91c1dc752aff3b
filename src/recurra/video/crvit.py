"""Attention over all steps and one memory token (CRT section 3, the compact recurrent vision Transformer)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from recurra._files.weights import shape_difference
from recurra.checks import choose, sentence
from recurra.layers.attention import SelfAttention
from recurra.layers.norms import at_least_float32
from recurra.mixers.base import with_zero_gradients
from recurra.mixers.rnn import RNN, RNNState
from recurra.models.compact_recurrent_transformer import CELLS
from recurra.models.registry import VideoSizes, register_model
from recurra.ops.cells.gru import GRUCell
from recurra.video.timesformer import (
    NORM_EPS,
    DividedBlock,
    DividedEncoder,
    VideoModel,
    VideoTransformerConfig,
    initialise,
)


class _MemoryAttention(SelfAttention):
    """SelfAttention with one more key and value, projected from the memory token with the weights of the steps."""

    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "N L d_model"], memory: Float[Tensor, "N d_model"], visible: Bool[Tensor, " N"]
    ) -> Float[Tensor, "N L d_model"]:
        known = torch.cat([memory[:, None], x], 1)
        queries, keys, values = self._heads(self.queries_keys_values(known), 3)
        seen = torch.cat([visible[:, None], visible.new_ones(1, 1).expand(len(visible), x.shape[1])], 1)
        return self._mix(queries[:, :, 1:], keys, values, seen[:, None, None])


class _PatchMemory(nn.Module):
    """One vector per patch position: the state of an RNN that reads the outputs at that position frame by frame."""

    def __init__(self, cell: GRUCell, n_patches: int) -> None:
        super().__init__()
        self.rnn = RNN(cell)
        self.n_vectors = n_patches

    def read(self, y: Float[Tensor, "B P T d"], memory: Float[Tensor, "B M d"]) -> Float[Tensor, "B M d"]:
        return self.rnn(y.flatten(0, 1), RNNState(memory.flatten(0, 1)))[1].h.unflatten(0, memory.shape[:2])


class _PooledMemory(_PatchMemory):
    """A single vector: the RNN reads the mean over the patches, and every position sees the vector."""

    def __init__(self, cell: GRUCell, n_patches: int) -> None:
        super().__init__(cell, 1)

    def read(self, y: Float[Tensor, "B P T d"], memory: Float[Tensor, "B M d"]) -> Float[Tensor, "B M d"]:
        return super().read(y.mean(1, keepdim=True), memory)


_PATCH_MEMORIES: dict[str, type[_PatchMemory]] = {"per_patch": _PatchMemory, "pooled": _PooledMemory}


@dataclass(frozen=True, kw_only=True)
class CompactRecurrentViTConfig(VideoTransformerConfig):
    """A CR-ViT; the defaults are the published ones, on ViT-B/16."""

    cell: str = "gru"
    """The recurrent cell of the memory: "gru" or "ncgru"."""
    memory: str = "per_patch"
    """The vectors of the memory: one "per_patch" position, or a single one, "pooled"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("cell", CELLS, self.cell)
        choose("memory", _PATCH_MEMORIES, self.memory)


class CompactRecurrentViTState(NamedTuple):
    """What is carried from segment to segment, of constant size and in float32 or better.

    memory: the state of the memory RNN, (B, patches, d_model), or (B, 1, d_model) if pooled; zeros at the start.
    class_token: the output class token of the previous segment; zeros at the start.
    started: 1 for streams that have read a segment, 0 at the start.
    """

    memory: Float[Tensor, "B M d_model"]
    class_token: Float[Tensor, "B d_model"]
    started: Float[Tensor, " B"]


class _MemoryBlock(DividedBlock):
    """A divided block whose time attention also sees the memory token of its patch position."""

    time_attention_kind = _MemoryAttention

    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "N tokens d_model"], memory: Float[Tensor, "N P d_model"], visible: Bool[Tensor, " N"]
    ) -> Float[Tensor, "N tokens d_model"]:
        """Apply the block; `visible` marks the sequences that see their memory."""
        normed, recalled = self.norm_time(self._by_patch(x)), self.norm_time(memory)
        seen = visible[:, None].expand(memory.shape[:2]).flatten()
        return self._after_time(x, self.time_attention(normed.flatten(0, 1), recalled.flatten(0, 1), seen))


class _MemoryEncoder(DividedEncoder):
    """Divided attention with a memory token in time attention; all blocks share memory and visibility."""

    block = _MemoryBlock


@register_model("crvit", config=CompactRecurrentViTConfig, reads=VideoSizes)
class CompactRecurrentViT(VideoModel):
    """TimeSformer's blocks over each segment, with a memory and the class token carried between segments (CRT Fig. 4).

    For each segment, the previous segment's output class token is added to the learned one, and the memory joins time
    attention. The classifier reads [previous class token, class token]; in a stream's first segment this is
    [class token, class token]. The memory RNN starts from the memory and reads the outputs frame by frame, without the
    class token; its last state is the next memory. The paper trains on two segments; here there may be any number.

    Memory and class token are taken after the final norm. Gradients flow through them until the caller detaches the
    state. Use `recurra.video.crvit.load_timesformer` to start from a trained TimeSformer.
    """

    config: CompactRecurrentViTConfig

    def __init__(self, config: CompactRecurrentViTConfig) -> None:
        super().__init__(config)
        self.encoder = _MemoryEncoder(config)
        self.norm = nn.LayerNorm(config.d_model, eps=NORM_EPS)
        cell = CELLS[config.cell](config.d_model, config.d_model)
        self.memory = _PATCH_MEMORIES[config.memory](cell, config.n_patches)
        self.head_dropout = nn.Dropout(config.head_dropout)
        self.head = nn.Linear(2 * config.d_model, config.n_classes)
        self.apply(initialise)

    def initial_state(self, batch: int) -> CompactRecurrentViTState:
        """Return zeros: no memory, and no segment read."""
        zero = at_least_float32(self.embedding.class_token.new_zeros(()))
        sizes = self.memory.n_vectors, self.config.d_model
        memory, class_token = zero.new_zeros(batch, *sizes), zero.new_zeros(batch, sizes[1])
        return CompactRecurrentViTState(memory, class_token, zero.new_zeros(batch))

    def read(
        self, segments: Float[Tensor, "B S T C H W"], state: CompactRecurrentViTState
    ) -> tuple[Float[Tensor, "B S n_classes"], CompactRecurrentViTState]:
        """Return the logits after each segment, and the next state."""
        outputs = []
        for segment in segments.unbind(1):
            logits, state = self._segment(segment, state)
            outputs.append(logits)
        # The memory after the last segment is of the state alone.
        y = with_zero_gradients(torch.stack(outputs, 1), self.memory.parameters() if len(outputs) == 1 else ())
        return y, state

    def _segment(self, segment: Tensor, state: CompactRecurrentViTState) -> tuple[Tensor, CompactRecurrentViTState]:
        has_past = state.started > 0
        class_token, patches = self.embedding(segment)
        tokens = self.encoder(
            class_token + state.class_token.to(class_token.dtype),
            patches,
            state.memory.expand(-1, self.config.n_patches, -1).to(patches.dtype),
            has_past,
        )
        tokens = self.norm(tokens)
        class_token = tokens[:, 0].clone()  # a view would keep the tokens of all patches alive
        before = torch.where(has_past[:, None], state.class_token.to(class_token.dtype), class_token)
        logits = self.head(self.head_dropout(torch.cat([before, class_token], 1)))
        memory = self.memory.read(tokens[:, 1:].unflatten(1, (self.config.n_patches, -1)), state.memory)
        after = CompactRecurrentViTState(memory, at_least_float32(class_token), torch.ones_like(state.started))
        return logits, after


def load_timesformer(model: CompactRecurrentViT, state_dict: Mapping[str, Tensor]) -> None:
    """Copy the weights of a trained `TimeSformer` with divided attention into a CR-ViT of the same sizes.

    All weights that both models have are copied. CR-ViT's classifier reads twice as many channels: each half gets half
    of TimeSformer's weights, so that the logits of a stream's first segment are TimeSformer's. The memory RNN keeps its
    weights.

    Args:
        model: the CR-ViT, changed in place.
        state_dict: the weights of the TimeSformer, `timesformer.state_dict()`.
    """
    weights = dict(state_dict)
    if "head.weight" in weights:
        weights["head.weight"] = torch.cat([weights["head.weight"]] * 2, 1) / 2
    weights |= {name: tensor for name, tensor in model.state_dict().items() if name.startswith("memory.")}
    if difference := shape_difference(model, weights):
        expected = f"the weights of a TimeSformer of these sizes and {model.config.n_layer} blocks"
        raise ValueError(sentence("state_dict", f"one of another model (it has {difference})", expected))
    model.load_state_dict(weights)
