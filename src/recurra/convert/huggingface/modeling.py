"""Language models as transformers' causal language models: loss, generation with a recurrent cache, saving."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Cache, GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto import modeling_auto

from recurra._files.digests import MANIFEST, read_manifest, write_manifest
from recurra._files.weights import require_finite
from recurra.checks import kind_of, sentence
from recurra.convert.huggingface.configuration import (
    ASSISTED,
    CONFIGS,
    MODEL_FILES,
    RecurraConfig,
    RecurrentCache,
    config_for,
    fitting_cache,
    require_sound,
)
from recurra.convert.portable import tied_parameters
from recurra.decoding.steps import prepare
from recurra.layers.embeddings import IGNORED_TARGET, counted_targets
from recurra.lengths import mask_fill
from recurra.models.shell import negative_log_likelihood

_LONGEST_AGAIN = 24
"""How many tokens are read again in front of the next ones, at most. More are read by themselves, once: without an end
to them, a text whose drafts are wrong again and again would be read from its start in every call."""


class RecurraForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model of this package, `model`, under transformers' interface; there is a subclass for each.

    `generate` carries a `RecurrentCache`, whose memory does not grow with the text. Padding may stand anywhere and
    changes nothing. If sequences differ in length, states that depend on the place in a segment are kept one by one.

    With an adaptive softmax (`cutoffs`) the logits are log-probabilities of all words, which serve as well.

    Args:
        config: the model's configuration.
        model: the model itself, of that configuration; a new one with fresh weights if None.
    """

    config_class = RecurraConfig
    base_model_prefix = "model"
    accepts_loss_kwargs = True
    model: Any
    _prepared: Any = None

    def __init__(self, config: RecurraConfig, model: nn.Module | None = None) -> None:
        super().__init__(config)
        if model is None:
            with _real_weights() as dtype:
                model = config.entry.make(config.entry.config(**config.of_the_model())).to(dtype)
        self.model = model
        self._tied_weights_keys = tied_parameters(self)
        self.post_init()

    def forward(
        self,
        input_ids: Int[Tensor, "B L"],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Int[Tensor, "B L"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Int[Tensor, " kept"] = 0,
        num_items_in_batch: int | Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Read tokens, continuing from `past_key_values`.

        Args:
            input_ids: the tokens that the cache has not seen; any id may stand where the mask is 0.
            attention_mask: (B, columns), 1 where a token counts, for these tokens or all that the streams have read.
            past_key_values: a `RecurrentCache`, which is changed in place and returned.
            labels: tokens, as `input_ids`; -100 does not count, nor do labels at or right after masked steps. The loss
                is the mean of -log p(labels[t + 1]) over the others, in float32 or better.
            use_cache: return the cache; if None, as the configuration says, but not in training.
            logits_to_keep: number of last logits to keep, or the steps whose logits to keep; 0 for all.
            num_items_in_batch: divides the loss instead of the number of labels.
            output_hidden_states, output_attentions, inputs_embeds: not offered.

        Returns:
            loss, if there are labels; logits (B, kept, vocabulary), zeros where the mask is 0; past_key_values.
        """
        if inputs_embeds is not None:
            raise ValueError(sentence("inputs_embeds", kind_of(inputs_embeds), "None", "pass input_ids"))
        _refuse_inner_states(self.config, output_hidden_states, output_attentions)
        all_logits = not isinstance(logits_to_keep, Tensor) and logits_to_keep == 0
        if labels is not None and not all_logits:
            raise ValueError(
                "logits_to_keep is set; expected 0 beside labels, which need the logits of all steps: omit it"
            )
        cache = fitting_cache(past_key_values, input_ids)
        mask = _counted(attention_mask, input_ids, 0 if cache is None else cache.n_tokens)
        kept = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep or None, None)
        wants_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        if cache is None and wants_cache:
            cache = RecurrentCache()
        logits = self._read(input_ids, cache, mask, kept)
        loss = None if labels is None else _loss(logits, labels, mask, num_items_in_batch)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache if wants_cache else None)
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    def _read(
        self,
        tokens: Int[Tensor, "B L"],
        cache: RecurrentCache | None,
        mask: Bool[Tensor, "B L"] | None,
        kept: slice | Tensor,
    ) -> Float[Tensor, "B kept V"]:
        """Return the logits of the kept steps; the cache takes the state after them."""
        is_prepared = not (self.training or torch.is_grad_enabled() or self._prepared is None)
        model = self._prepared if is_prepared else self.model
        cache = RecurrentCache() if cache is None else cache
        if cache.again is not None and cache.again.tokens.shape[1] > _LONGEST_AGAIN:
            again = cache.again
            cache.put(model.hidden(again.tokens, cache.state, mask=again.mask)[1], again.tokens, again.mask)
        if cache.again is None and model is not self.model and mask is None and tokens.shape[1] == 1:
            logits, state = model(tokens, cache.state)
            cache.put(state, tokens)
            return logits[:, kept]
        if mask is not None:
            tokens = tokens.masked_fill(~mask, 0)  # padding may have ids of its own, which no embedding knows
        n_again = 0 if cache.again is None else cache.again.tokens.shape[1]
        if cache.again is not None:
            tokens, mask = cache.again.followed_by(tokens, mask)
        hidden, state = model.hidden(tokens, cache.state, mask=mask)
        cache.put(state, tokens, mask)
        counts = None if mask is None else mask[:, n_again:][:, kept]
        return mask_fill(model.head(hidden[:, n_again:][:, kept]), counts, 0)

    def prepare_for_decoding(self, dtype: str | None = "float32") -> None:
        """Let `generate`, and all else that runs without gradients, use a copy made by `recurra.decoding.prepare`.

        The model itself stays as it is, and is what is saved and trained. The copy is dropped in training mode. Call
        this again after weights have changed or layers have been replaced.

        Args:
            dtype: how the copy keeps its weights: "float32" (the model's results, up to the order of sums),
                "bfloat16", "int8" or "int4"; None drops the copy.
        """
        if dtype is not None:
            _refuse_adapters(self.model)
        prepared = None if dtype is None else prepare(self.model, dtype)
        object.__setattr__(self, "_prepared", prepared)  # no submodule, whose weights would be saved

    def train(self, mode: bool = True) -> "RecurraForCausalLM":
        """Set training or evaluation mode; training drops the copy for decoding, whose weights would grow old."""
        if mode:
            self.prepare_for_decoding(None)
        return super().train(mode)

    def prepare_inputs_for_generation(
        self,
        input_ids: Int[Tensor, "B L"],
        next_sequence_length: int | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Pass `forward` the tokens that the cache has not seen, with the mask over all."""
        if not input_ids.shape[1]:
            hint = "begin with a token, such as the one that starts a text"
            raise ValueError(sentence("input_ids", f"of shape {tuple(input_ids.shape)}", "at least one token", hint))
        if past_key_values is not None and next_sequence_length is not None and next_sequence_length < 1:
            raise ValueError(
                f"the cache has read {past_key_values.get_seq_length()} tokens and input_ids has {input_ids.shape[1]}; "
                "expected the whole text, at least one token longer than what was read, or the new tokens alone with "
                "the attention_mask of all"
            )
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *arguments: Any, **options: Any
    ) -> Any:
        """Make the cache if it has to exist before the first call."""
        mode = options.get("generation_mode", arguments[0] if arguments else None)
        assists = generation_config.is_assistant or mode == GenerationMode.ASSISTED_GENERATION
        is_needed = assists or generation_config.prefill_chunk_size is not None
        if is_needed and generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = RecurrentCache(keeps=ASSISTED if assists else 0)
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *arguments, **options)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """No: `forward` makes the cache. transformers' own counts the tokens in an attention layer."""
        return False

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
        super().save_pretrained(save_directory, is_main_process, *arguments, **options)
        if is_main_process:
            folder = Path(save_directory)
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

    def get_output_embeddings(self) -> nn.Module:
        """The head, which returns the logits."""
        head: nn.Module = self.model.head
        return head

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *arguments: Any, **options: Any) -> nn.Module:
        """Return the embedding; refuse to change the number of tokens."""
        if new_num_tokens not in (None, self.config.vocab_size):
            raise NotImplementedError(
                f"the vocabulary has {self.config.vocab_size} tokens and cannot become {new_num_tokens}; padding needs "
                "no token of its own: with the attention mask any id may stand there"
            )
        return self.get_input_embeddings()


def _model_class(config: type[RecurraConfig]) -> type[RecurraForCausalLM]:
    attributes = {
        "__doc__": f"`recurra.models.{config.entry.model.__name__}` under transformers' interface.",
        "__module__": __name__,
        "config_class": config,
    }
    return type(f"Recurra{config.entry.label}ForCausalLM", (RecurraForCausalLM,), attributes)


MODELS: tuple[type[RecurraForCausalLM], ...] = tuple(_model_class(config) for config in CONFIGS)
globals().update({model.__name__: model for model in MODELS})  # so that they can be imported, and pickled


def causal_lm(model: nn.Module, **others: Any) -> RecurraForCausalLM:
    """Put a model under transformers' interface. It is the same model, not a copy.

    Args:
        model: a registered language model.
        others: further attributes of the configuration.
    """
    config = config_for(model.config, **others)
    kind = next(kind for kind in MODELS if kind.config_class is type(config))
    return kind(config, model).train(model.training)


def _refuse_adapters(model: nn.Module) -> None:
    """Refuse layers with adapters, which the copy for decoding would leave out or keep for good."""
    for name, module in model.named_modules():
        if type(module).__module__.partition(".")[0] == "peft" or hasattr(module, "active_adapters"):
            got = f"one with an adapter, the {type(module).__name__} {name}"
            raise ValueError(sentence("model", got, "one without", "call merge_and_unload first"))


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


def _refuse_inner_states(config: RecurraConfig, hidden_states: bool | None, attentions: bool | None) -> None:
    wanted = {"output_hidden_states": hidden_states, "output_attentions": attentions}
    for name, value in wanted.items():
        if getattr(config, name, False) if value is None else value:
            raise ValueError(
                f"{name} is set; expected False, as inner states are not offered: model.model.hidden(input_ids) "
                "returns the last hidden states, which the head reads"
            )


def _counted(attention_mask: Tensor | None, tokens: Int[Tensor, "B L"], n_seen: int) -> Bool[Tensor, "B L"] | None:
    """Return the part of the mask for these tokens; None if all count."""
    if attention_mask is None:
        return None
    n_rows, n_tokens = tokens.shape
    if tuple(attention_mask.shape) not in ((n_rows, n_tokens), (n_rows, n_seen + n_tokens)):
        raise ValueError(
            f"attention_mask is of shape {tuple(attention_mask.shape)}; expected {(n_rows, n_tokens)} as input_ids, or "
            f"{(n_rows, n_seen + n_tokens)} with the {n_seen} tokens that were read before"
        )
    mask = attention_mask[:, attention_mask.shape[1] - n_tokens :].bool()
    return None if bool(mask.all()) else mask


def _loss(
    logits: Float[Tensor, "B L V"],
    labels: Int[Tensor, "B L"],
    mask: Bool[Tensor, "B L"] | None,
    n_items: int | Tensor | None,
) -> Float[Tensor, ""]:
    """The mean loss of predicting labels[t + 1] at step t, where both steps count."""
    targets = counted_targets(labels[:, 1:], None if mask is None else mask[:, 1:] & mask[:, :-1])
    losses = negative_log_likelihood(logits[:, :-1], targets)
    return losses.sum() / ((targets != IGNORED_TARGET).sum() if n_items is None else n_items)


def register() -> None:
    """Make the models known to AutoConfig and AutoModelForCausalLM; a second call changes nothing.

    transformers' Trainer finds the names of causal language models in a table that AutoModelForCausalLM does not fill.
    It smooths the labels of others without shifting them: those models would learn to copy.
    """
    names = getattr(modeling_auto, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {})
    for model in MODELS:
        AutoConfig.register(model.config_class.model_type, model.config_class, exist_ok=True)
        AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)
        names[model.config_class.model_type] = model.__name__
