"""Configurations of the language models as transformers keeps them: the fields of the model's own, in config.json."""

from dataclasses import fields
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from recurra.models import CompactRecurrentTransformerConfig, LanguageModelConfig, TransformerXLConfig


class RecurraConfig(PreTrainedConfig):
    """What the configurations have in common; the fields of the model's own configuration are attributes of them."""

    model_config: ClassVar[type[Any]]
    """The model's own configuration class."""
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    use_cache: bool = True
    """Give back the recurrent state, in evaluation; in training only when `forward` is asked for it."""

    def __post_init__(self, **others: Any) -> None:
        super().__post_init__(**others)
        self.model_config(**self.of_the_model())  # refuses what cannot be; may also settle what was left open

    def of_the_model(self) -> dict[str, Any]:
        """The fields of the model's own configuration."""
        return {field.name: getattr(self, field.name) for field in fields(self.model_config)}


class RecurraLanguageModelConfig(RecurraConfig, LanguageModelConfig):
    """A `recurra.models.LanguageModel`, any registered mixer in it; it must predict the tokens that it reads."""

    model_type: ClassVar[str] = "recurra"
    model_config: ClassVar[type[Any]] = LanguageModelConfig
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "tie_word_embeddings": "tie_embeddings",
    }

    def __post_init__(self, **others: Any) -> None:
        super().__post_init__(**others)
        if self.output_size not in (None, self.vocab_size):
            raise ValueError(
                f"output_size is {self.output_size} and vocab_size {self.vocab_size}; a causal language model predicts "
                "the tokens that it reads"
            )


_TRANSFORMER_NAMES = {**RecurraLanguageModelConfig.attribute_map, "num_attention_heads": "n_heads"}


class RecurraCRTConfig(RecurraConfig, CompactRecurrentTransformerConfig):
    """A `recurra.models.CompactRecurrentTransformer`."""

    model_type: ClassVar[str] = "recurra-crt"
    model_config: ClassVar[type[Any]] = CompactRecurrentTransformerConfig
    attribute_map: ClassVar[dict[str, str]] = _TRANSFORMER_NAMES


class RecurraTransformerXLConfig(RecurraConfig, TransformerXLConfig):
    """A `recurra.models.TransformerXL`."""

    model_type: ClassVar[str] = "recurra-transformer-xl"
    model_config: ClassVar[type[Any]] = TransformerXLConfig
    attribute_map: ClassVar[dict[str, str]] = _TRANSFORMER_NAMES


CONFIGS: tuple[type[RecurraConfig], ...] = (RecurraLanguageModelConfig, RecurraCRTConfig, RecurraTransformerXLConfig)


def config_for(model_config: Any, **others: Any) -> RecurraConfig:
    """Give the transformers configuration of a model's own.

    Args:
        model_config: a `LanguageModelConfig`, `CompactRecurrentTransformerConfig` or `TransformerXLConfig`.
        others: any other attributes, such as `bos_token_id`.

    Raises:
        TypeError: it is none of them.
        ValueError: the model predicts something else than the tokens that it reads.
    """
    for kind in CONFIGS:
        if type(model_config) is kind.model_config:
            return kind(**{field.name: getattr(model_config, field.name) for field in fields(model_config)}, **others)
    known = ", ".join(kind.model_config.__name__ for kind in CONFIGS)
    raise TypeError(f"model_config is of type {type(model_config).__name__}; expected one of {known}")
