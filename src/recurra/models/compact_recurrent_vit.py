"""The compact recurrent vision Transformer (CR-ViT): TimeSformer with a memory between segments (CRT section 3)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from recurra.layers.memory_attention import MemoryAttention
from recurra.layers.precision import at_least_float32
from recurra.models.likelihood import PlainLikelihood
from recurra.models.patch_memory import PATCH_MEMORIES
from recurra.models.segment_memory import CELLS
from recurra.models.space_time import DividedEncoder, SegmentEmbedding
from recurra.models.space_time_blocks import NORM_EPS, DividedBlock, initialise
from recurra.models.transformer_shape import require_choices
from recurra.models.video_shape import VideoTransformerConfig, VideoTransformerShape, require_clip


@dataclass(kw_only=True)
class CompactRecurrentViTShape(VideoTransformerShape):
    """The shape of a CR-ViT but for what the data give; the defaults are the published one's, on ViT-B/16."""

    cell: str = "gru"
    """The recurrent cell that keeps the memory: "gru" or "ncgru"."""
    memory: str = "per_patch"
    """How many vectors are carried: one "per_patch" position, or a single one, "pooled"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choices(self, {"cell": CELLS, "memory": PATCH_MEMORIES})


@dataclass(kw_only=True)
class CompactRecurrentViTConfig(CompactRecurrentViTShape, VideoTransformerConfig):
    """A CR-ViT; the defaults are the published one's over segments of 8 frames of 224 pixels."""


class CompactRecurrentViTState(NamedTuple):
    """What a stream's segments leave for the next one; of constant size.

    memory: the memory RNN's state, (B, patches, d_model), or (B, 1, d_model) where it is pooled; zeros at the start.
    class_token: the output class token of the segment before; zeros at the start.
    started: for every row 1 where a segment lies behind it, 0 at the start of a stream.
    """

    memory: Float[Tensor, "B M d_model"]
    class_token: Float[Tensor, "B d_model"]
    started: Float[Tensor, " B"]


class MemoryBlock(DividedBlock):
    """A divided block whose time attention has the memory token of a patch position among its keys and values.

    The token goes through the block's norm and projections as the frames do, and no block changes it; it gets no time
    embedding. All this is our choice; the paper says only that it is used in time attention. A stream's first segment
    has no memory behind it and does not see the zeros that stand for one: it is TimeSformer's. This is our choice, too.
    """

    time_attention_kind = MemoryAttention

    def forward(  # type: ignore[override]
        self,
        x: Float[Tensor, "N tokens d_model"],
        memory: Float[Tensor, "N P d_model"],
        visible: Bool[Tensor, " N"],
    ) -> Float[Tensor, "N tokens d_model"]:
        """Apply the block; `visible` says which rows see their memory."""
        normed, recalled = self.norm_time(self._by_patch(x)), self.norm_time(memory)
        seen = visible[:, None].expand(memory.shape[:2]).flatten()
        return self._after_time(x, self.time_attention(normed.flatten(0, 1), recalled.flatten(0, 1), seen))


class MemoryEncoder(DividedEncoder):
    """Divided attention with a memory token in time attention; the blocks share memory and visibility."""

    block = MemoryBlock


class CompactRecurrentViT(PlainLikelihood):
    """Segments of frames through TimeSformer's blocks, a memory and the class token carried between them (CRT Fig. 4).

    For every segment: the output class token of the segment before is added to the learned one; the memory joins time
    attention; the classifier reads [class token of the segment before, class token], which in a stream's first segment
    is [class token, class token]; the memory RNN reads the outputs but the class token, frame by frame, going on from
    the memory: its last state is the next memory. The paper trains two segments; here there may be any number.

    What is carried are outputs after the final norm. Gradients flow through it until the caller detaches the state.
    `recurra.models.load_timesformer` starts one from a trained TimeSformer.

    Args:
        config: the model's shape.
    """

    def __init__(self, config: CompactRecurrentViTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = SegmentEmbedding(config)
        self.encoder = MemoryEncoder(config)
        self.norm = nn.LayerNorm(config.d_model, eps=NORM_EPS)
        cell = CELLS[config.cell](config.d_model, config.d_model)
        self.memory = PATCH_MEMORIES[config.memory](cell, config.n_patches)
        self.head_dropout = nn.Dropout(config.head_dropout)
        self.head = nn.Linear(2 * config.d_model, config.n_classes)
        self.apply(initialise)

    def forward(
        self, clip: Float[Tensor, "B T C H W"], state: CompactRecurrentViTState | None = None
    ) -> tuple[Float[Tensor, "B S n_classes"], CompactRecurrentViTState]:
        """Give the logits after every segment, going on from `state`; None is the start of a stream.

        Args:
            clip: normalised frames, a whole number S >= 1 of segments.
            state: what the segments before left; its rows may be at different points of their streams.

        Raises:
            ValueError: the frames are of another size, or no whole number of segments; or the state is of another
                batch or model.
        """
        require_clip(clip, self.config)
        state = self._start(clip) if state is None else self._checked(state, clip.shape[0])
        outputs = []
        for segment in clip.split(self.config.n_frames, 1):
            logits, state = self._segment(segment, state)
            outputs.append(logits)
        return torch.stack(outputs, 1), state

    def _segment(self, segment: Tensor, state: CompactRecurrentViTState) -> tuple[Tensor, CompactRecurrentViTState]:
        """Give the logits (B, n_classes) of one segment."""
        has_past = state.started > 0
        class_token, patches = self.embedding(segment)
        tokens = self.encoder(
            class_token + state.class_token.to(class_token.dtype),
            patches,
            self.memory.tokens(state.memory).to(patches.dtype),
            has_past,
        )
        tokens = self.norm(tokens)
        class_token = tokens[:, 0].clone()  # a carried view would keep the tokens of all patches alive
        before = torch.where(has_past[:, None], state.class_token.to(class_token.dtype), class_token)
        logits = self.head(self.head_dropout(torch.cat([before, class_token], 1)))
        memory = self.memory.read(tokens[:, 1:].unflatten(1, (self.config.n_patches, -1)), state.memory)
        after = CompactRecurrentViTState(memory, at_least_float32(class_token), torch.ones_like(state.started))
        return logits, after

    def _start(self, clip: Tensor) -> CompactRecurrentViTState:
        memory = self.memory.start(clip)
        class_token = memory.new_zeros(clip.shape[0], self.config.d_model)
        return CompactRecurrentViTState(memory, class_token, memory.new_zeros(clip.shape[0]))

    def _checked(self, state: CompactRecurrentViTState, batch: int) -> CompactRecurrentViTState:
        expected = (batch, self.memory.n_vectors, self.config.d_model)
        if tuple(state.memory.shape) != expected:
            raise ValueError(
                f"state.memory is of shape {tuple(state.memory.shape)}; this clip and this model go on from "
                f"{expected}: one state per row of the batch (`recurra.state.select` takes rows out), made by a model "
                "of the same sizes"
            )
        return state
