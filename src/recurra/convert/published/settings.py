"""The config.json of a published model: every entry is read, neutral or refused by name."""

from collections.abc import Mapping
from typing import Any

from recurra.checks import sentence

_OF_GENERATION = {
    "bad_words_ids",
    "begin_suppress_tokens",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
}
"""How transformers before 5 goes on from a model's logits: they stood in every config."""

OF_NO_CONCERN = _OF_GENERATION | {
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "finetuning_task",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "prefix",
    "problem_type",
    "return_dict",
    "sep_token_id",
    "task_specific_params",
    "tf_legacy_loss",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "use_bfloat16",
    "use_cache",
}
"""What says nothing about what the model computes."""


class Settings:
    """Entries of a config.json, taken one by one; `finish` refuses what is left.

    Args:
        entries: the content of config.json.
        name: what messages call it.
    """

    def __init__(self, entries: Mapping[str, Any], name: str) -> None:
        self._left = {key: value for key, value in entries.items() if key not in OF_NO_CONCERN}
        self._name = name

    def size(self, key: str, default: int | None = None) -> int:
        """Take a whole number above 0.

        Raises:
            ValueError: it is missing and has no default, or is something else.
        """
        value = self._left.pop(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            came = "missing" if value is None else repr(value)
            raise ValueError(sentence(f"{key} in {self._name}", came, "a whole number above 0"))
        return value

    def number(self, key: str, default: float) -> float:
        """Take a number.

        Raises:
            ValueError: it is something else.
        """
        value = self._left.pop(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(sentence(f"{key} in {self._name}", repr(value), "a number"))
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Take true or false.

        Raises:
            ValueError: it is something else.
        """
        value = self._left.pop(key, default)
        if not isinstance(value, bool):
            raise ValueError(sentence(f"{key} in {self._name}", repr(value), "true or false"))
        return value

    def take(self, key: str, default: Any = None) -> Any:
        """Take anything."""
        return self._left.pop(key, default)

    def only(self, key: str, *neutral: Any) -> None:
        """Take an entry that must have one of these values, or be missing.

        Raises:
            ValueError: it has another.
        """
        value = self._left.pop(key, neutral[0])
        if not any(value is one or value == one for one in neutral):
            raise ValueError(
                sentence(
                    f"{key} in {self._name}", f"{value!r}, which is not supported", " or ".join(map(repr, neutral))
                )
            )

    def ignore(self, *keys: str) -> None:
        """Drop entries that say how a model starts or trains, not what it computes."""
        for key in keys:
            self._left.pop(key, None)

    def finish(self) -> None:
        """Refuse what nobody took.

        Raises:
            ValueError: naming the entries.
        """
        if self._left:
            came = f"one with {', '.join(sorted(self._left))}"
            raise ValueError(sentence(self._name, came, "no entries that this converter does not know"))
