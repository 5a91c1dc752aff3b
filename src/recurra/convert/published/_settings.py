"""The entries of a published config.json: each is read, neutral or refused by name."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from recurra.checks import require, sentence

_MOST = 2**31 - 1

# How transformers before 5 goes on from a model's logits stood in every config.
_OF_NO_CONCERN_NAMES = """
_name_or_path architectures attn_implementation auto_map bos_token_id chunk_size_feed_forward dtype eos_token_id
finetuning_task id2label initializer_range is_encoder_decoder label2id model_type output_attentions
output_hidden_states pad_token_id prefix problem_type return_dict sep_token_id task_specific_params tf_legacy_loss
tokenizer_class torch_dtype torchscript transformers_version use_bfloat16 use_cache
bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample early_stopping
encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty
max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores
remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
"""
_OF_NO_CONCERN = frozenset(_OF_NO_CONCERN_NAMES.split())
"""What says nothing about what the model computes."""


class Settings:
    """Entries of a config.json, which messages call `name`, taken one by one; `finish` refuses what is left."""

    def __init__(self, entries: Mapping[str, Any], name: str) -> None:
        self._left = {key: value for key, value in entries.items() if key not in _OF_NO_CONCERN}
        self._name = name

    def rename(self, other: str, key: str) -> None:
        """Let the entry `key` stand under another name, too."""
        value = self._left.pop(other, None)
        if value is not None and self._left.setdefault(key, value) != value:
            raise self._refusal(other, repr(value), f"that of {key}, {self._left[key]!r}")

    def size(self, key: str, default: int | None = None, *, least: int = 1, most: int = _MOST) -> int:
        """Take a whole number from `least` to `most`."""
        value = self._left.pop(key, default)
        if not _is_whole(value, least, most):
            got = "missing" if value is None else repr(value)
            raise self._refusal(key, got, f"a whole number from {least} to {most}")
        return int(value)

    def options(self, names: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
        """Take options; `names` maps their names here to entries and their defaults, which also set the types.

        Whole numbers must be above 0.
        """
        take: dict[type, Callable[[str, Any], Any]] = {int: self.size, float: self.number, bool: self.flag}
        return {own: take[type(default)](key, default) for own, (key, default) in names.items()}

    def optional_size(self, key: str, default: int | None = None, *, absent: str | None = None) -> int | None:
        """Take a whole number above 0; None if it is null or the word `absent`, or missing without a default."""
        value = self._left.pop(key, default)
        if value is None or (absent is not None and value == absent):
            return None
        if not _is_whole(value, 1, _MOST):
            others = "or null" if absent is None else f"null or {absent!r}"
            raise self._refusal(key, repr(value), f"a whole number above 0, {others}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """Take a finite number."""
        value = self._left.pop(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # of a whole number of any length, unlike math.isfinite
        if not is_number or not abs(value) <= sys.float_info.max:
            raise self._refusal(key, "missing" if value is None else repr(value), "a finite number")
        return float(value)

    def positive(self, key: str, default: float = 1.0) -> float:
        """Take a finite number above 0."""
        value = self.number(key, default)
        if value <= 0:
            raise self._refusal(key, repr(value), "a number above 0")
        return value

    def factors(self, key: str, n: int) -> list[float]:
        """Take a list of n finite numbers above 0; ones if it is null or missing."""
        value = self._left.pop(key, None)
        value = [1.0] * n if value is None else value
        if not isinstance(value, list) or len(value) != n:
            raise self._refusal(key, repr(value), f"a list of {n} numbers")
        return [Settings({key: one}, self._name).positive(key) for one in value]

    def channels(self, key: str, default: float, d_model: int) -> float:
        """Take a factor of d_model; return the product."""
        channels = d_model * self.number(key, default)
        if not math.isfinite(channels):
            raise self._refusal(key, f"a factor for {channels} channels", "one for a finite number")
        return channels

    def words(self, key: str, known: Iterable[str]) -> list[str] | None:
        """Take a list of one or more of the words `known`; None if it is null or missing."""
        value, known = self._left.pop(key, None), list(known)
        if value is not None and not (isinstance(value, list) and value and all(word in known for word in value)):
            raise self._refusal(key, repr(value), f"a list of {', '.join(known)}")
        return value

    def layers(self, key: str, known: Mapping[str, str], default: list[str]) -> list[str]:
        """Take a list with one word for each layer, and return what each stands for in `known`.

        `default` has the same length, and is used if the list is null or missing.
        """
        kinds = self.words(key, known) or default
        require(len(kinds) == len(default), key, kinds, f"one of {', '.join(known)} for each of {len(default)} layers")
        return [known[kind] for kind in kinds]

    def numbers(self, key: str) -> list[int] | None:
        """Take a list of whole numbers from 0 up; None if it is null or missing."""
        value = self._left.pop(key, None)
        if value is not None and not (isinstance(value, list) and all(_is_whole(number, 0, _MOST) for number in value)):
            raise self._refusal(key, repr(value), "a list of whole numbers")
        return value

    def word(self, key: str, known: Iterable[Any]) -> Any:
        """Take one of the words `known`, which may have None among them; the first if it is missing."""
        known = list(known)
        value = self._left.pop(key, known[0])
        if value not in known:
            raise self._refusal(key, repr(value), f"one of {', '.join(map(str, known))}")
        return value

    def text(self, key: str, letters: str) -> str:
        """Take a text of these letters; an empty one if it is missing."""
        value = self._left.pop(key, "")
        if not isinstance(value, str) or not set(value) <= set(letters):
            raise self._refusal(key, repr(value), f"a text of the letters {letters}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Take true or false."""
        value = self._left.pop(key, default)
        if not isinstance(value, bool):
            raise self._refusal(key, repr(value), "true or false")
        return value

    def section(self, key: str) -> "Settings":
        """Take an object of entries; one without any if it is null or missing."""
        value = self._left.pop(key, None)
        if value is not None and not isinstance(value, dict):
            raise self._refusal(key, repr(value), "an object")
        return Settings(value or {}, f"{key} in {self._name}")

    def rotation(self, share: float, base: float = 10000.0, neutral: str = "") -> tuple[float, float]:
        """Take the base of rotary attention's angles and the share of the channels that turn, with these defaults.

        `neutral` names the entries of rope_parameters that are dropped.
        """
        section = self.section("rope_parameters")
        base = section.number("rope_theta", self.number("rope_theta", base))
        share = section.number("partial_rotary_factor", self.number("partial_rotary_factor", share))
        if not 0 <= share <= 1:
            raise self._refusal("partial_rotary_factor", repr(share), "a share from 0 to 1")
        section.only(rope_type="default", type="default")  # the second is its name in older files
        section.ignore(neutral)
        section.finish()
        self.only(rope_scaling=None)
        return base, share

    def attention(self, d_model: int, n_kv_heads: int | None = 8) -> dict[str, Any]:
        """Take the heads of attention without a window, and its dropout.

        `n_kv_heads` is the number of heads of keys if its entry is missing; None for that of queries.
        """
        n_heads = self.size("num_attention_heads", 32)
        return {
            "n_heads": n_heads,
            "n_kv_heads": self.optional_size("num_key_value_heads", n_kv_heads) or n_heads,
            "d_head": self.optional_size("head_dim") or d_model // n_heads,
            "dropout": self.number("attention_dropout", 0.0),
            "window": None,
        }

    def whole_rotation(self, base: float = 10000.0) -> float:
        """Take the base of rotary attention's angles, where all channels turn."""
        base, share = self.rotation(1.0, base)
        require(share == 1, "partial_rotary_factor", share, "1.0, as transformers' class turns all channels")
        return base

    def rotates(self) -> bool:
        """Tell whether the base of rotary attention's angles is not null; take it if it is."""
        section = self._left.get("rope_parameters")
        inner = section if isinstance(section, dict) else {}
        bases = [entries["rope_theta"] for entries in (inner, self._left) if "rope_theta" in entries]
        if bases[:1] != [None]:
            return True
        self._left["rope_parameters"] = {key: value for key, value in inner.items() if key != "rope_theta"}
        self.only(rope_theta=None)
        return False

    def only(self, **neutral: Any) -> None:
        """Take entries that must have this value, or one of a tuple, or be missing."""
        for key, value in neutral.items():
            known = value if isinstance(value, tuple) else (value,)
            got = self._left.pop(key, known[0])
            if not any(got is one or got == one for one in known):
                raise self._refusal(key, f"{got!r}, which is not supported", " or ".join(map(repr, known)))

    def ignore(self, keys: str) -> None:
        """Drop entries that say how a model starts, trains or runs, not what it computes; blanks between them."""
        for key in keys.split():
            self._left.pop(key, None)

    def finish(self) -> None:
        """Refuse what nobody took."""
        if self._left:
            got = f"one with {', '.join(sorted(self._left))}"
            raise ValueError(sentence(self._name, got, "no entries that this converter does not know"))

    def _refusal(self, key: str, got: str, expected: str) -> ValueError:
        return ValueError(sentence(f"{key} in {self._name}", got, expected))


def written(options: Mapping[str, Any], names: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """The inverse of `Settings.options`."""
    return {key: options[own] for own, (key, _) in names.items()}


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
