"""The compact recurrent vision Transformer (CR-ViT): TimeSformer with a memory between segments (CRT section 3)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from recurra.checks import require_choice
from recurra.layers.memory_attention import MemoryAttention
from recurra.layers.precision import at_least_float32
from recurra.models.patch_memory import PATCH_MEMORIES
from recurra.models.registry import VideoSizes, register_model
from recurra.models.segment_memory import CELLS
from recurra.models.space_time import DividedEncoder
from recurra.models.space_time_blocks import NORM_EPS, DividedBlock, initialise
from recurra.models.video_config import VideoTransformerConfig
from recurra.models.video_model import VideoModel


@dataclass(frozen=True, kw_only=True)
class CompactRecurrentViTConfig(VideoTransformerConfig):
    """A CR-ViT; the defaults are the published ones, on ViT-B/16."""

    cell: str = "gru"
    """The recurrent cell of the memory: "gru" or "ncgru"."""
    memory: str = "per_patch"
    """The vectors of the memory: one "per_patch" position, or a single one, "pooled"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(CELLS, cell=self.cell)
        require_choice(PATCH_MEMORIES, memory=self.memory)


class CompactRecurrentViTState(NamedTuple):
    """What is carried from segment to segment, of constant size and in float32 or better.

    memory: the state of the memory RNN, (B, patches, d_model), or (B, 1, d_model) if pooled; zeros at the start.
    class_token: the output class token of the previous segment; zeros at the start.
    started: 1 for streams that have read a segment, 0 at the start.
    """

    memory: Float[Tensor, "B M d_model"]
    class_token: Float[Tensor, "B d_model"]
    started: Float[Tensor, " B"]


class MemoryBlock(DividedBlock):
    """A divided block whose time attention also sees the memory token of its patch position.

    The token passes through the block's norm and projections like the frames, but no block changes it and it gets no
    time embedding. This is our choice; the paper says only that time attention uses it. A stream's first segment has no
    memory yet and does not see the zeros in its place, so that it is computed as by TimeSformer: our choice, too.
    """

    time_attention_kind = MemoryAttention

    def forward(  # type: ignore[override]
        self,
        x: Float[Tensor, "N tokens d_model"],
        memory: Float[Tensor, "N P d_model"],
        visible: Bool[Tensor, " N"],
    ) -> Float[Tensor, "N tokens d_model"]:
        """Apply the block; `visible` marks the sequences that see their memory."""
        normed, recalled = self.norm_time(self._by_patch(x)), self.norm_time(memory)
        seen = visible[:, None].expand(memory.shape[:2]).flatten()
        return self._after_time(x, self.time_attention(normed.flatten(0, 1), recalled.flatten(0, 1), seen))


class MemoryEncoder(DividedEncoder):
    """Divided attention with a memory token in time attention; all blocks share memory and visibility."""

    block = MemoryBlock


@register_model("crvit", config=CompactRecurrentViTConfig, label="CRViT", reads=VideoSizes)
class CompactRecurrentViT(VideoModel):
    """TimeSformer's blocks over each segment, with a memory and the class token carried between segments (CRT Fig. 4).

    For each segment, the previous segment's output class token is added to the learned one, and the memory joins time
    attention. The classifier reads [previous class token, class token]; in a stream's first segment this is
    [class token, class token]. The memory RNN starts from the memory and reads the outputs frame by frame, without the
    class token; its last state is the next memory. The paper trains on two segments; here there may be any number.

    Memory and class token are taken after the final norm. Gradients flow through them until the caller detaches the
    state. Use `recurra.models.load_timesformer` to start from a trained TimeSformer.

    Args:
        config: the model's shape.
    """

    config: CompactRecurrentViTConfig

    def __init__(self, config: CompactRecurrentViTConfig) -> None:
        super().__init__(config)
        self.encoder = MemoryEncoder(config)
        self.norm = nn.LayerNorm(config.d_model, eps=NORM_EPS)
        cell = CELLS[config.cell](config.d_model, config.d_model)
        self.memory = PATCH_MEMORIES[config.memory](cell, config.n_patches)
        self.head_dropout = nn.Dropout(config.head_dropout)
        self.head = nn.Linear(2 * config.d_model, config.n_classes)
        self.apply(initialise)

    def start(self, batch: int, like: Tensor) -> CompactRecurrentViTState:
        """Return zeros: no memory, and no segment read."""
        memory = self.memory.start(batch, like)
        return CompactRecurrentViTState(memory, like.new_zeros(batch, self.config.d_model), like.new_zeros(batch))

    def read(
        self, segments: Float[Tensor, "B S T C H W"], state: CompactRecurrentViTState
    ) -> tuple[Float[Tensor, "B S n_classes"], CompactRecurrentViTState]:
        """Return the logits after each segment, and the next state."""
        outputs = []
        for segment in segments.unbind(1):
            logits, state = self._segment(segment, state)
            outputs.append(logits)
        return torch.stack(outputs, 1), state

    def _segment(self, segment: Tensor, state: CompactRecurrentViTState) -> tuple[Tensor, CompactRecurrentViTState]:
        """Return the logits (B, n_classes) of one segment."""
        has_past = state.started > 0
        class_token, patches = self.embedding(segment)
        tokens = self.encoder(
            class_token + state.class_token.to(class_token.dtype),
            patches,
            self.memory.tokens(state.memory).to(patches.dtype),
            has_past,
        )
        tokens = self.norm(tokens)
        class_token = tokens[:, 0].clone()  # a view would keep the tokens of all patches alive
        before = torch.where(has_past[:, None], state.class_token.to(class_token.dtype), class_token)
        logits = self.head(self.head_dropout(torch.cat([before, class_token], 1)))
        memory = self.memory.read(tokens[:, 1:].unflatten(1, (self.config.n_patches, -1)), state.memory)
        after = CompactRecurrentViTState(memory, at_least_float32(class_token), torch.ones_like(state.started))
        return logits, after
