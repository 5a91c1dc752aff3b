"""The config.json of a published model: every entry is read, neutral or refused by name."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from recurra.checks import sentence
from recurra.models.language_model import LanguageModelConfig

MOST_LAYERS = 10**6
"""How many layers a config.json may ask for: each gets an entry in a list before any weight is read."""

_MOST = 2**31 - 1

_OF_GENERATION_NAMES = """
bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample early_stopping
encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty
max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores
remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
"""
_OF_GENERATION = frozenset(_OF_GENERATION_NAMES.split())
"""How transformers before 5 goes on from a model's logits: they stood in every config."""

_OF_NO_CONCERN_NAMES = """
_name_or_path architectures attn_implementation auto_map bos_token_id chunk_size_feed_forward dtype eos_token_id
finetuning_task id2label initializer_range is_encoder_decoder label2id model_type output_attentions
output_hidden_states pad_token_id prefix problem_type return_dict sep_token_id task_specific_params tf_legacy_loss
tokenizer_class torch_dtype torchscript transformers_version use_bfloat16 use_cache
"""
OF_NO_CONCERN = _OF_GENERATION | frozenset(_OF_NO_CONCERN_NAMES.split())
"""What says nothing about what the model computes."""


class Settings:
    """Entries of a config.json, which messages call `name`, taken one by one; `finish` refuses what is left."""

    def __init__(self, entries: Mapping[str, Any], name: str) -> None:
        self._left = {key: value for key, value in entries.items() if key not in OF_NO_CONCERN}
        self._name = name

    def size(self, key: str, default: int | None = None, *, least: int = 1, most: int = _MOST) -> int:
        """Take a whole number from `least` to `most`."""
        value = self._left.pop(key, default)
        if not _is_whole(value, least, most):
            got = "missing" if value is None else repr(value)
            raise self._refusal(key, got, f"a whole number from {least} to {most}")
        return int(value)

    def optional_size(self, key: str, default: int | None = None, *, absent: str | None = None) -> int | None:
        """Take a whole number above 0; None if it is null or the word `absent`, or missing without a default."""
        value = self._left.pop(key, default)
        if value is None or (absent is not None and value == absent):
            return None
        if not _is_whole(value, 1, _MOST):
            others = "or null" if absent is None else f"null or {absent!r}"
            raise self._refusal(key, repr(value), f"a whole number above 0, {others}")
        return int(value)

    def number(self, key: str, default: float) -> float:
        """Take a finite number."""
        value = self._left.pop(key, default)
        # of a whole number of any length, unlike math.isfinite
        if not _is_number(value) or not abs(value) <= sys.float_info.max:
            raise self._refusal(key, repr(value), "a finite number")
        return float(value)

    def words(self, key: str, known: Iterable[str]) -> list[str] | None:
        """Take a list of one or more of the words `known`; None if it is null or missing."""
        value, known = self._left.pop(key, None), list(known)
        if value is not None and not (isinstance(value, list) and value and all(word in known for word in value)):
            raise self._refusal(key, repr(value), f"a list of {', '.join(known)}")
        return value

    def numbers(self, key: str) -> list[int]:
        """Take a list of whole numbers from 0 up; empty if it is null or missing."""
        value = self._left.pop(key, None)
        if value is not None and not (isinstance(value, list) and all(_is_whole(number, 0, _MOST) for number in value)):
            raise self._refusal(key, repr(value), "a list of whole numbers")
        return value or []

    def section(self, key: str) -> "Settings":
        """Take an object, whose own entries are then taken one by one; without entries if it is null or missing."""
        value = self._left.pop(key, None)
        if value is not None and not isinstance(value, dict):
            raise self._refusal(key, repr(value), "an object")
        return Settings(value or {}, f"{key} in {self._name}")

    def flag(self, key: str, default: bool) -> bool:
        """Take true or false."""
        value = self._left.pop(key, default)
        if not isinstance(value, bool):
            raise self._refusal(key, repr(value), "true or false")
        return value

    def only(self, key: str, *neutral: Any) -> None:
        """Take an entry that must have one of these values, or be missing."""
        value = self._left.pop(key, neutral[0])
        if not any(value is one or value == one for one in neutral):
            raise self._refusal(key, f"{value!r}, which is not supported", " or ".join(map(repr, neutral)))

    def ignore(self, *keys: str) -> None:
        """Drop entries that say how a model starts or trains, not what it computes."""
        for key in keys:
            self._left.pop(key, None)

    def finish(self) -> None:
        """Refuse what nobody took."""
        if self._left:
            got = f"one with {', '.join(sorted(self._left))}"
            raise ValueError(sentence(self._name, got, "no entries that this converter does not know"))

    def _refusal(self, key: str, got: str, expected: str) -> ValueError:
        return ValueError(sentence(f"{key} in {self._name}", got, expected))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def hybrid_config(
    settings: Settings,
    mixers: Sequence[str],
    options: Mapping[str, dict[str, Any]],
    *,
    d_model: int,
    norm_epsilon: float,
    vocab_size: int,
    d_channel_mixing: int,
) -> LanguageModelConfig:
    """Make the shape of a hybrid stack of transformers: RMS norms, SwiGLU networks, no biases, and a mixer a block."""
    return LanguageModelConfig(
        vocab_size=settings.size("vocab_size", vocab_size),
        n_layer=len(mixers),
        d_model=d_model,
        d_channel_mixing=settings.size("intermediate_size", d_channel_mixing),
        mixer=list(mixers),
        mixer_options={name: options[name] for name in dict.fromkeys(mixers)},
        feed_forward="swiglu",
        norm="rms",
        norm_epsilon=norm_epsilon,
        biases=False,
        tie_embeddings=settings.flag("tie_word_embeddings", False),
    )
