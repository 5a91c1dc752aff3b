"""What the models share under transformers' interface, and the model without a head: tokens in, hidden states out."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import can_return_tuple

from recurra._files.digests import MANIFEST, read_manifest, write_manifest
from recurra._files.reading import one_line
from recurra._files.weights import require_finite
from recurra._files.writing import naming
from recurra.checks import require, require_shape, sentence
from recurra.convert.huggingface.configuration import (
    MODEL_FILES,
    RecurraConfig,
    RecurrentCache,
    fitting_cache,
    require_sound,
)
from recurra.convert.portable import tied_parameters
from recurra.layers.softmax import CappedHead
from recurra.lengths import check_cu_seqlens, mask_fill
from recurra.models.shell import keep_activations, recompute

_LONGEST_AGAIN = 24
"""How many tokens are read again in front of the next ones, at most. More are read by themselves, once: without an end
to them, a text whose drafts are wrong again and again would be read from its start in every call."""


class RecurraPreTrainedModel(PreTrainedModel):
    """What the models with and without a head share: loading, saving, embeddings, activation checkpointing."""

    config_class = RecurraConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True
    _supports_context_parallel = False
    model: Any
    """The model of this package."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *arguments: Any,
        output_loading_info: bool = False,
        **options: Any,
    ) -> Any:
        """Load a folder that `save_pretrained` wrote; arguments as transformers has them."""
        place = pretrained_model_name_or_path
        options["subfolder"] = options.get("subfolder") or ""  # transformers takes no None
        folder = None if place is None else Path(place) / options["subfolder"]
        if folder is not None and folder.is_dir():  # else a name on the Hub
            require_sound(folder, MODEL_FILES)
        model, info = super().from_pretrained(place, *arguments, output_loading_info=True, **options)
        source = cls.__name__ if place is None else str(place)
        absent = sorted(info["missing_keys"]) + sorted(name for name, *_ in info["mismatched_keys"])
        if absent:
            more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
            raise ValueError(
                f"the weights of {source} are not all of this model: {', '.join(absent[:3])}{more} are missing or of "
                "another size"
            )
        require_finite(model.state_dict(), source)
        # transformers does not update what modules derive from their weights when these are loaded.
        model.model.load_state_dict(model.model.state_dict())
        return (model, info) if output_loading_info else model

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, *arguments: Any, **options: Any
    ) -> None:
        """Write a folder as transformers does, and the digests of its files in manifest.json; arguments as there."""
        folder = Path(save_directory)
        try:
            with naming(folder):
                super().save_pretrained(save_directory, is_main_process, *arguments, **options)
        except SafetensorError as error:  # also of a full disk
            raise OSError(sentence(str(folder), f"not written ({one_line(error)})", "a folder with room")) from error
        if is_main_process:
            try:
                about = read_manifest(folder)
            except ValueError:  # a damaged one is replaced, as transformers replaces the other files
                about = {}
                (folder / MANIFEST).unlink()
            write_manifest(folder, about, MODEL_FILES)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Map the later names of shared parameters to their first names."""
        return dict(self._tied_weights_keys)

    def _init_weights(self, module: nn.Module) -> None:
        """Keep the weights: the model draws its own when it is made."""

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        embedding: nn.Module = self.model.embedding
        return embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding."""
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        """The layer that returns the logits, before `logit_cap` bounds them."""
        head: nn.Module = self.model.head
        return head.linear if isinstance(head, CappedHead) else head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        """Replace the layer that returns the logits."""
        if isinstance(self.model.head, CappedHead):
            self.model.head.linear = new_embeddings
        else:
            self.model.head = new_embeddings

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *arguments: Any, **options: Any) -> nn.Module:
        """Change the number of tokens of embedding and head, as transformers does; refused with adaptive embeddings."""
        if not isinstance(self.get_input_embeddings(), nn.Embedding):
            if new_num_tokens not in (None, self.config.vocab_size):
                raise NotImplementedError(
                    f"the vocabulary has {self.config.vocab_size} tokens and cannot become {new_num_tokens}, as its "
                    "embedding is adaptive; padding needs no token: with the attention mask any id may stand there"
                )
            return self.get_input_embeddings()
        self.base_model.keep_prepared(None)
        embedding = super().resize_token_embeddings(new_num_tokens, *arguments, **options)
        self.config.output_size = None
        self.model.config = replace(self.model.config, vocab_size=self.config.vocab_size, output_size=None)
        return embedding

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *_: Any, **__: Any) -> str:
        """Take any that transformers or a kernel repository has: the mixers choose their kernels themselves."""
        name = attn_implementation or "eager"
        known = ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys())
        require(name in known or "/" in name, "attn_implementation", name, f"one of {', '.join(known)}")
        return name

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable = checkpoint, every_n_layers: int = 1
    ) -> None:
        """Recompute every n-th block in the backward pass, or none."""
        reentrant = getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant")
        require(not reentrant, "use_reentrant", reentrant, "False: states have gradients, too")
        for number, block in enumerate(self.model.blocks):
            keep_activations(block)
            if enable and number % every_n_layers == 0:
                recompute(block, gradient_checkpointing_func)
        self.base_model.gradient_checkpointing = enable


class Inputs(NamedTuple):
    """What a call reads, checked."""

    x: Tensor
    """Tokens (B, L), or vectors in their place (B, L, d_model)."""
    cache: RecurrentCache
    mask: Bool[Tensor, "B L"] | None
    """True where a step counts; None if all do."""
    reset: Bool[Tensor, "B L"] | None
    """True where a document begins; None if none does inside of a row."""

    @property
    def is_plain_step(self) -> bool:
        """Whether it is one token of each stream that continues it."""
        alone = self.mask is None and self.reset is None and self.cache.again is None
        return alone and self.x.dim() == 2 and self.x.shape[1] == 1


class RecurraModel(RecurraPreTrainedModel):
    """A language model of this package, `model`, that returns what its head reads.

    Args:
        config: the model's configuration.
        model: the model itself, of that configuration; a new one with fresh weights if None.
    """

    _prepared: Any = None

    def __init__(self, config: RecurraConfig, model: nn.Module | None = None) -> None:
        super().__init__(config)
        if model is None:
            with _real_weights() as dtype:
                model = config.entry.make(config.own()).to(dtype)
        self.model = model
        self._no_split_modules = {type(block).__name__ for block in model.blocks}  # type: ignore[union-attr]
        self._tied_weights_keys = tied_parameters(self)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B L"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "B L d_model"] | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **borders: Any,
    ) -> BaseModelOutputWithPast:
        """Read tokens, continuing from `past_key_values`; arguments as `RecurraForCausalLM.forward` has them.

        Returns:
            last_hidden_state (B, L, d_model), which the head reads, zeros where the mask is 0; past_key_values;
            hidden_states, if asked for.
        """
        inputs = self.inputs(
            input_ids, inputs_embeds, attention_mask, past_key_values, position_ids=position_ids, **borders
        )
        hidden, depths = self.read(inputs, self.wants_depths(output_hidden_states, output_attentions))
        cache = inputs.cache if self.wants_cache(use_cache) else None
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=cache, hidden_states=depths)

    def inputs(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        **borders: Any,
    ) -> Inputs:
        """Check what a call reads."""
        if (input_ids is None) == (inputs_embeds is None):
            got = "None" if input_ids is None else "given beside inputs_embeds"
            raise ValueError(sentence("input_ids", got, "one of input_ids and inputs_embeds"))
        x = inputs_embeds if input_ids is None else input_ids
        assert x is not None
        cache = fitting_cache(past_key_values, x) or RecurrentCache()
        mask = _counted(attention_mask, x, cache.n_tokens)
        return Inputs(x, cache, mask, _starts(x, cache, mask, **borders))

    def read(self, inputs: Inputs, deep: bool = False) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Return what the head reads, and if `deep` what each block does, too; the cache takes the state after them."""
        x, cache, mask, reset = inputs
        model, again = self.reader, cache.again
        if again is not None and (
            again.tokens.shape[1] > _LONGEST_AGAIN or again.tokens.dim() != x.dim() or reset is not None
        ):
            cache.put(model.hidden(again.tokens, cache.state, mask=again.mask)[1], again.tokens, again.mask)
        x = mask_fill(x, mask, 0)  # padding may have ids of its own, which no embedding knows
        n_again = 0 if cache.again is None else cache.again.tokens.shape[1]
        if cache.again is not None:
            x, mask = cache.again.followed_by(x, mask)
        run = model.hidden_states if deep else model.hidden
        y, state = run(x, cache.state, mask=mask, reset=reset)
        cache.put(state, x, mask, is_croppable=reset is None)
        depths = y[:, n_again:].unbind(2) if deep else None
        return (y[:, n_again:], None) if depths is None else (depths[-1], depths)

    @property
    def reader(self) -> Any:
        """The model that runs: without gradients the copy for decoding, if there is one."""
        is_prepared = not (self.training or torch.is_grad_enabled() or self._prepared is None)
        return self._prepared if is_prepared else self.model

    def keep_prepared(self, copy: nn.Module | None) -> None:
        """Take a copy for decoding, or drop it."""
        object.__setattr__(self, "_prepared", copy)  # no submodule, whose weights would be saved

    def wants_cache(self, use_cache: bool | None) -> bool:
        """Say whether a call returns its cache."""
        return bool(self.config.use_cache and not self.training if use_cache is None else use_cache)

    def wants_depths(self, hidden_states: bool | None, attentions: bool | None) -> bool:
        """Say whether a call returns the hidden states of every depth; refuse attentions, which no mixer returns."""
        if self.config.output_attentions if attentions is None else attentions:
            raise ValueError(sentence("output_attentions", True, "False, as the mixers form no attention matrix"))
        return bool(self.config.output_hidden_states if hidden_states is None else hidden_states)

    def train(self, mode: bool = True) -> "RecurraModel":
        """Set training or evaluation mode; training drops the copy for decoding, whose weights would grow old."""
        if mode:
            self.keep_prepared(None)
        return super().train(mode)


@contextmanager
def _real_weights() -> Iterator[torch.dtype]:
    """Make weights on the CPU and in float32 or better, wherever and in whatever dtype transformers wants them."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(dtype, torch.float32))
    try:
        with torch.device("cpu"):
            yield dtype
    finally:
        torch.set_default_dtype(dtype)


def _counted(attention_mask: Tensor | None, x: Tensor, n_seen: int) -> Bool[Tensor, "B L"] | None:
    """Return the part of the mask for these tokens; None if all count."""
    if attention_mask is None:
        return None
    n_rows, n_tokens = x.shape[:2]
    if tuple(attention_mask.shape) not in ((n_rows, n_tokens), (n_rows, n_seen + n_tokens)):
        raise ValueError(
            f"attention_mask is of shape {tuple(attention_mask.shape)}; expected {(n_rows, n_tokens)} as input_ids, or "
            f"{(n_rows, n_seen + n_tokens)} with the {n_seen} tokens that were read before"
        )
    mask = attention_mask[:, attention_mask.shape[1] - n_tokens :].bool()
    return None if bool(mask.all()) else mask


def _starts(
    x: Tensor,
    cache: RecurrentCache,
    mask: Bool[Tensor, "B L"] | None,
    position_ids: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    cache_position: Tensor | None = None,
) -> Bool[Tensor, "B L"] | None:
    """Mark the first step of each document; None if a row continues one, or begins with one and has no other.

    The lengths follow from the borders, and the keys' borders are the queries'.
    """
    if cache_position is not None:
        first, expected = int(cache_position[0]), f"{cache.n_tokens}, the tokens that the cache has read"
        require(first == cache.n_tokens, "cache_position[0]", first, expected)
    if position_ids is None and seq_idx is None and cu_seq_lens_q is None:
        return None
    shape, starts = x.shape[:2], torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    if position_ids is not None:
        require_shape("position_ids", position_ids, (1 if len(position_ids) == 1 else shape[0], shape[1]))
        starts |= (position_ids == 0) & (True if mask is None else mask)  # padding may have any position
    if seq_idx is not None:
        require_shape("seq_idx", seq_idx, shape)
        starts[:, 1:] |= seq_idx[:, 1:] != seq_idx[:, :-1]
    if cu_seq_lens_q is not None:
        check_cu_seqlens(cu_seq_lens_q, *shape)
        firsts = cu_seq_lens_q[:-1].long()
        starts[0, firsts[firsts < shape[1]]] = True
    counts = (torch.ones_like(starts) if mask is None else mask).long()
    has_past = cache.is_initialized | (counts.cumsum(1) > counts)
    return starts if bool((starts & has_past).any()) else None
