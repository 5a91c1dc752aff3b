"""Language models as transformers' causal language models: loss, and generation with a recurrent cache."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Cache, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto import modeling_auto
from transformers.utils.generic import can_return_tuple

from recurra.checks import sentence
from recurra.convert.huggingface.backbone import Inputs, RecurraModel, RecurraPreTrainedModel
from recurra.convert.huggingface.configuration import (
    ASSISTED,
    RecurraConfig,
    RecurrentCache,
    config_for,
)
from recurra.convert.portable import tied_parameters
from recurra.decoding.steps import prepare
from recurra.layers.embeddings import IGNORED_TARGET, counted_targets
from recurra.lengths import mask_fill
from recurra.models.shell import negative_log_likelihood


class RecurraForCausalLM(RecurraPreTrainedModel, GenerationMixin):
    """A language model of this package, `model`, under transformers' interface.

    `generate` carries a `RecurrentCache`, whose memory does not grow with the text. Padding may stand anywhere and
    changes nothing. If sequences differ in length, states that depend on the place in a segment are kept one by one.

    With an adaptive softmax (`cutoffs`) the logits are log-probabilities of all words, which serve as well.

    Args:
        config: the model's configuration.
        model: the model itself, of that configuration; a new one with fresh weights if None.
    """

    accepts_loss_kwargs = True

    def __init__(self, config: RecurraConfig, model: nn.Module | None = None) -> None:
        super().__init__(config)
        self.backbone = RecurraModel(config, model)
        self._tied_weights_keys = tied_parameters(self)
        self.post_init()

    @property
    def model(self) -> Any:
        """The model of this package, with its head."""
        return self.backbone.model

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B L"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "B L d_model"] | None = None,
        labels: Int[Tensor, "B L"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Int[Tensor, " kept"] = 0,
        num_items_in_batch: int | Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **borders: Any,
    ) -> CausalLMOutputWithPast:
        """Read tokens, continuing from `past_key_values`.

        Args:
            input_ids: the tokens that the cache has not seen; any id may stand where the mask is 0.
            attention_mask: (B, columns), 1 where a token counts, for these tokens or all that the streams have read.
            position_ids: (B, L) or (1, L), 0 at the first token of each document; otherwise without effect.
            past_key_values: a `RecurrentCache`, which is changed in place and returned.
            inputs_embeds: vectors in place of tokens, such as `get_input_embeddings()` makes of them.
            labels: tokens, as `input_ids`; -100 does not count, nor do labels at or right after masked steps, or of a
                document's first token. The loss is the mean of -log p(labels[t + 1]) over the others, in float32 or
                better.
            use_cache: return the cache; if None, as the configuration says, but not in training.
            logits_to_keep: number of last logits to keep, or the steps whose logits to keep; 0 for all.
            num_items_in_batch: labels of all batches of an update, as transformers' `Trainer` counts them, masked steps
                included. The loss is then the mean times this batch's share of them.
            output_hidden_states: return the input of each block, and last what the head reads.
            output_attentions: refused if True.
            borders: what else marks documents, `seq_idx` (B, L) or `cu_seq_lens_q` (N + 1) of a batch of one with the
                keys' and the maximal lengths; `cache_position`, which must be the cache's; `return_dict`, for a tuple
                if False.

        Returns:
            loss, if there are labels; logits (B, kept, vocabulary), zeros where the mask is 0; past_key_values;
            hidden_states, if asked for.
        """
        all_logits = not isinstance(logits_to_keep, Tensor) and logits_to_keep == 0
        if labels is not None and not all_logits:
            raise ValueError(
                "logits_to_keep is set; expected 0 beside labels, which need the logits of all steps: omit it"
            )
        kept = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep or None, None)
        body = self.backbone
        deep = body.wants_depths(output_hidden_states, output_attentions)
        inputs = body.inputs(
            input_ids, inputs_embeds, attention_mask, past_key_values, position_ids=position_ids, **borders
        )
        depths = None
        if inputs.is_plain_step and not deep and body.reader is not self.model:
            logits, state = body.reader(inputs.x, inputs.cache.state)  # which is compiled
            inputs.cache.put(state, inputs.x)
        else:
            hidden, depths = body.read(inputs, deep)
            counts = None if inputs.mask is None else inputs.mask[:, kept]
            logits = mask_fill(body.reader.head(hidden[:, kept]), counts, 0)
        return CausalLMOutputWithPast(
            loss=None if labels is None else _loss(logits, labels, inputs, num_items_in_batch),
            logits=logits,
            past_key_values=inputs.cache if body.wants_cache(use_cache) else None,
            hidden_states=depths,
        )

    def prepare_for_decoding(self, dtype: str | None = "float32") -> None:
        """Let `generate`, and all else that runs without gradients, use a copy made by `recurra.decoding.prepare`.

        The model itself stays as it is, and is what is saved and trained. The copy is dropped in training mode. Call
        this again after weights have changed or layers have been replaced.

        Args:
            dtype: how the copy keeps its weights: "float32" (the model's results, up to the order of sums),
                "bfloat16", "int8" or "int4"; None drops the copy.
        """
        prepared = None if dtype is None else prepare(self.model, dtype)
        self.backbone.keep_prepared(prepared)

    def prepare_inputs_for_generation(
        self,
        input_ids: Int[Tensor, "B L"],
        next_sequence_length: int | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Pass `forward` the tokens that the cache has not seen, with the mask over all."""
        if not input_ids.shape[1] and inputs_embeds is None:
            hint = "begin with a token, such as the one that starts a text"
            raise ValueError(sentence("input_ids", f"of shape {tuple(input_ids.shape)}", "at least one token", hint))
        if past_key_values is not None and next_sequence_length is not None and next_sequence_length < 1:
            raise ValueError(
                f"the cache has read {past_key_values.get_seq_length()} tokens and input_ids has {input_ids.shape[1]}; "
                "expected the whole text, at least one token longer than what was read, or the new tokens alone with "
                "the attention_mask of all"
            )
        kwargs.pop("tokenizer", None)  # of `stop_strings`, which transformers passes on to the model as well
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
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

    def _prepare_position_ids_for_generation(self, *arguments: Any) -> None:
        """None: the state knows where it is."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """No: `forward` makes the cache. transformers' own counts the tokens in an attention layer."""
        return False


def causal_lm(model: nn.Module, **others: Any) -> RecurraForCausalLM:
    """Put a model under transformers' interface. It is the same model, not a copy.

    Args:
        model: a registered language model.
        others: further attributes of the configuration.
    """
    return RecurraForCausalLM(config_for(model.config, **others), model).train(model.training)


def _loss(
    logits: Float[Tensor, "B L V"], labels: Int[Tensor, "B L"], inputs: Inputs, n_items: int | Tensor | None
) -> Float[Tensor, ""]:
    """The mean loss of predicting labels[t + 1] at step t, where both steps count and are of one document."""
    targets = counted_targets(labels[:, 1:], None if inputs.mask is None else inputs.mask[:, 1:] & inputs.mask[:, :-1])
    targets = counted_targets(targets, None if inputs.reset is None else ~inputs.reset[:, 1:])
    total, n_counted = negative_log_likelihood(logits[:, :-1], targets).sum(), (targets != IGNORED_TARGET).sum()
    if n_items is None:
        return total / n_counted
    # n_items also counts labels after masked steps: the mean over those that count stands for these
    return total / n_counted.clamp(min=1) * (labels[:, 1:] != IGNORED_TARGET).sum() / n_items


def register() -> None:
    """Make the models known to AutoConfig, AutoModel and AutoModelForCausalLM; a second call changes nothing.

    transformers' Trainer finds the names of causal language models in a table that AutoModelForCausalLM does not fill.
    It smooths the labels of others without shifting them: those models would learn to copy.
    """
    kind, names = RecurraConfig.model_type, getattr(modeling_auto, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {})
    AutoConfig.register(kind, RecurraConfig, exist_ok=True)
    AutoModel.register(RecurraConfig, RecurraModel, exist_ok=True)
    AutoModelForCausalLM.register(RecurraConfig, RecurraForCausalLM, exist_ok=True)
    names[kind] = RecurraForCausalLM.__name__
