"""Configurations of the language models as transformers keeps them: the fields of the model's own, in config.json.

There is one class per registered language model, named Recurra<label>Config.
"""

from dataclasses import MISSING, Field, field, fields
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from recurra.checks import kind_of, sentence
from recurra.models import DataSizes, ModelEntry, list_models

_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layer",
    "tie_word_embeddings": "tie_embeddings",
    "num_attention_heads": "n_heads",
}
"""What transformers calls fields of ours."""


class RecurraConfig(PreTrainedConfig):
    """What the configurations share; the fields of the model's own configuration are attributes of them."""

    entry: ClassVar[ModelEntry]
    """The model in the registry."""
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    use_cache: bool = True
    """Return the recurrent state in evaluation; in training only if `forward` is asked for it."""

    def __post_init__(self, **others: Any) -> None:
        super().__post_init__(**others)
        settled = self.entry.config(**self.of_the_model())  # refuses what cannot be
        for each in fields(settled):
            setattr(self, each.name, getattr(settled, each.name))
        if getattr(self, "output_size", None) not in (None, self.vocab_size):
            expected = f"vocab_size = {self.vocab_size}: a causal language model predicts the tokens that it reads"
            raise ValueError(sentence("output_size", self.output_size, expected))

    def of_the_model(self) -> dict[str, Any]:
        """The fields of the model's own configuration."""
        return {field.name: getattr(self, field.name) for field in fields(self.entry.config)}


def _config_class(entry: ModelEntry) -> type[RecurraConfig]:
    own = fields(entry.config)
    names = {each.name for each in own}
    is_first = entry.label == "LanguageModel"  # its name in files is older than the registry
    attributes = {
        "__doc__": f"A `recurra.models.{entry.model.__name__}`; it must predict the tokens that it reads.",
        "__module__": __name__,
        "__annotations__": {
            "model_type": ClassVar[str],
            "attribute_map": ClassVar[dict[str, str]],
            **{each.name: each.type for each in own},
        },
        **{each.name: _default(each) for each in own},
        "entry": entry,
        "model_type": "recurra" if is_first else f"recurra-{entry.name}",
        "attribute_map": {theirs: ours for theirs, ours in _NAMES.items() if ours in names},
    }
    return type(f"Recurra{entry.label}Config", (RecurraConfig,), attributes)


def _default(own: Field[Any]) -> Any:
    return own.default if own.default_factory is MISSING else field(default_factory=own.default_factory)


CONFIGS: tuple[type[RecurraConfig], ...] = tuple(_config_class(entry) for entry in list_models(DataSizes))
globals().update({config.__name__: config for config in CONFIGS})  # so that they can be imported, and pickled


def config_for(model_config: Any, **others: Any) -> RecurraConfig:
    """Return the transformers configuration of a model's own.

    Args:
        model_config: the configuration of a registered language model.
        others: any other attributes, such as `bos_token_id`.

    Raises:
        TypeError: it is something else.
        ValueError: the model predicts something other than the tokens that it reads.
    """
    for kind in CONFIGS:
        if type(model_config) is kind.entry.config:
            return kind(**{field.name: getattr(model_config, field.name) for field in fields(model_config)}, **others)
    known = ", ".join(kind.entry.config.__name__ for kind in CONFIGS)
    raise TypeError(sentence("model_config", kind_of(model_config), f"one of {known}"))
