"""Configurations and the recurrent cache of the language models in transformers, and checks of their folders."""

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from transformers import Cache, PreTrainedConfig

from recurra._files.digests import read_manifest, require_files
from recurra._files.reading import read_json
from recurra._files.weights import read_metadata
from recurra.checks import choose, kind_of, require, require_at_least, sentence
from recurra.models.registry import DataSizes, ModelEntry, list_models
from recurra.state import detach, n_streams, select

MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index*.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

_WITH_CODE = ("config.json", "tokenizer_config.json", "generation_config.json")


def require_sound(folder: Path, patterns: Iterable[str]) -> dict[str, Any]:
    """Refuse a folder with files that are not what they should be, before transformers reads them."""
    manifest = read_manifest(folder)
    require_files(folder, manifest.get("files", {}), patterns)
    for path in (folder / name for name in _WITH_CODE):
        if path.is_file() and "auto_map" in read_json(path):
            got = "a file with auto_map, which names code to run"
            raise ValueError(sentence(str(path), got, "a folder without code of its own", "remove auto_map"))
    for path in sorted(folder.glob("*.safetensors")):
        read_metadata(path, "weights that save_pretrained wrote")
    return manifest


class RecurraConfig(PreTrainedConfig):
    """The configuration of a language model; the fields of the model's own configuration are attributes of this one.

    Args:
        model: the model's name in the registry.
        use_cache: return the recurrent state in evaluation; in training only if `forward` is asked for it.
        others: those fields, and what every configuration of transformers has.
    """

    model_type: ClassVar[str] = "recurra"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "tie_word_embeddings": "tie_embeddings",
        "final_logit_softcapping": "logit_cap",
    }
    """What transformers calls fields of ours."""
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    auto_map: ClassVar[dict[str, str]] = {}
    """No folder has code; TRL asks."""

    def __init__(self, model: str = "recurrent", use_cache: bool = True, **others: Any) -> None:
        self.model, self.use_cache = model, use_cache
        n_heads = others.pop("num_attention_heads", None)
        if n_heads is not None and any(each.name == "n_heads" for each in fields(self.entry.config)):
            others.setdefault("n_heads", n_heads)
        super().__init__(**others)
        own = self.own()  # refuses what cannot be
        for each in fields(own):
            setattr(self, each.name, getattr(own, each.name))
        if getattr(self, "output_size", None) not in (None, self.vocab_size):
            expected = f"vocab_size = {self.vocab_size}: a causal language model predicts the tokens that it reads"
            raise ValueError(sentence("output_size", self.output_size, expected))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """Make a configuration as transformers does; one of a folder is first compared with its digest."""
        if (place := options.get("name_or_path")) and Path(place).is_dir():
            require_files(Path(place), read_manifest(Path(place)).get("files", {}), ("config.json",))
        return super().from_dict(config_dict, **options)

    @property
    def num_attention_heads(self) -> int:
        """`n_heads`, or 1: PEFT's prompt tuning asks for it and does not use it."""
        return getattr(self, "n_heads", 1)

    @num_attention_heads.setter
    def num_attention_heads(self, n_heads: int) -> None:
        if hasattr(self, "n_heads"):
            self.n_heads = n_heads

    def to_dict(self) -> dict[str, Any]:
        """Return everything, `num_attention_heads` too."""
        return {**super().to_dict(), "num_attention_heads": self.num_attention_heads}

    @property
    def entry(self) -> ModelEntry:
        """The model in the registry."""
        return choose("model", {entry.name: entry for entry in list_models(DataSizes)}, self.model)

    def own(self) -> Any:
        """Return the model's own configuration."""
        kind, known = self.entry.config, vars(self)
        return kind(**{each.name: known[each.name] for each in fields(kind) if each.name in known})


def config_for(model_config: Any, **others: Any) -> RecurraConfig:
    """Return the transformers configuration of a registered language model's own.

    others: any other attributes, such as `bos_token_id`.
    """
    for entry in list_models(DataSizes):
        if type(model_config) is entry.config:
            own = {each.name: getattr(model_config, each.name) for each in fields(model_config)}
            return RecurraConfig(model=entry.name, **own, **others)
    known = ", ".join(entry.config.__name__ for entry in list_models(DataSizes))
    raise TypeError(sentence("model_config", kind_of(model_config), f"one of {known}"))


ASSISTED = 256
"""How many tokens a cache can take back once transformers asks it to record the past, as assisted generation does."""


class _Call(NamedTuple):
    """Tokens, or vectors in their place, that were read in one call, and the state before them."""

    state: Any
    tokens: Shaped[Tensor, "B L *d_model"]
    mask: Bool[Tensor, "B L"] | None

    def followed_by(self, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Put more tokens behind these, with their mask; no mask if all count."""
        both = torch.cat([self.tokens.to(tokens.device), tokens], 1)
        if self.mask is None and mask is None:
            return both, None
        parts = ((self.mask, self.tokens), (mask, tokens))
        masks = [given if given is not None else of.new_ones(of.shape[:2], dtype=torch.bool) for given, of in parts]
        return both, torch.cat(masks, 1)


class RecurrentCache(Cache):
    """A batch of streams between two calls: a model's state, and the number of tokens it has read.

    The model replaces the state, because transformers' caches change in place. States themselves never change, so
    `copy.copy(cache)` is a free bookmark from which a text can be continued twice.

    The size does not grow with the tokens. The last `keeps` tokens can be taken back by `crop`: the cache then has the
    states between the last calls. At the border of a call the state itself comes back; inside of a call, the state
    before it does, and the next call reads the tokens between (`again`) once more, with its own.

    Args:
        keeps: how many of the last tokens can be taken back, at least.
    """

    def __init__(self, keeps: int = 0) -> None:
        super().__init__(layers=[])
        require_at_least(0, keeps=keeps)
        self.keeps = keeps
        """Number of last tokens that can be taken back, at least."""
        self.state: Any = None
        """The model's state before the tokens that are read again; None at the start of a stream."""
        self.n_tokens = 0
        """Tokens read so far, padding included: columns of `input_ids`."""
        self.again: _Call | None = None
        """What the next call has to read again, from `state`; None unless a call was taken back in part."""
        self._calls: tuple[_Call, ...] = ()  # the last calls, end to end, up to `state`

    def __bool__(self) -> bool:
        """True even if it is empty: transformers' own caches count their layers."""
        return True

    def __repr__(self) -> str:
        return f"RecurrentCache(n_tokens={self.n_tokens}, batch_size={self.batch_size})"

    def put(self, state: Any, tokens: Tensor, mask: Tensor | None = None, *, is_croppable: bool = True) -> None:
        """Take the state after a call that read `tokens`, with those to be read `again` in front of them.

        Tokens (B, L) or vectors in their place; `crop` takes back neither them nor earlier ones unless `is_croppable`.
        """
        n_again = 0 if self.again is None else self.again.tokens.shape[1]
        calls = [*self._calls, _Call(self.state, tokens, mask)] if is_croppable else []
        n_kept = sum(call.tokens.shape[1] for call in calls)
        while calls and n_kept - calls[0].tokens.shape[1] >= self.keeps:
            n_kept -= calls.pop(0).tokens.shape[1]
        self.state, self.again, self._calls = state, None, tuple(calls)
        self.n_tokens += tokens.shape[1] - n_again

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens that the streams have read, padding included."""
        return self.n_tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no end."""
        return -1

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether anything was read."""
        return self.state is not None or self.again is not None

    @property
    def batch_size(self) -> int:
        """Number of streams; -1 until something is read."""
        count = n_streams((self.state, self.again))
        return -1 if count is None else count

    @property
    def is_compileable(self) -> bool:
        """No: a state is replaced, not written into."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether anything was read."""
        return self.has_previous_state()

    @property
    def is_croppable(self) -> bool:
        """Whether any token can be taken back."""
        return self.keeps > 0

    def activate_past_recording(self) -> None:
        """Let `crop` take back at least 256 tokens from here on; assisted generation asks for it."""
        self.keeps = max(self.keeps, ASSISTED)

    def reorder_cache(self, beam_idx: Int[Tensor, " batch"]) -> None:
        """Let stream i continue from where stream beam_idx[i] is."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these streams, in this order."""
        self.state = select(self.state, indices)
        self.again, self._calls = select(self.again, indices), select(self._calls, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every stream `repeats` times in a row: for beams, or for several continuations of a prompt."""
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def detach(self) -> None:
        """Cut the gradients that flow through the state."""
        self.state, self.again, self._calls = detach((self.state, self.again, self._calls))

    def reset(self) -> None:
        """Start new streams."""
        self.state, self.n_tokens, self.again, self._calls = None, 0, None, ()

    def crop(self, tokens_to_remove: int) -> None:
        """Take tokens back, so that the streams continue from before them.

        Args:
            tokens_to_remove: minus the number of last tokens, as in transformers; 0 changes nothing.
        """
        require(tokens_to_remove <= 0, "tokens_to_remove", tokens_to_remove, "0 or below: minus how many to take back")
        calls = [*self._calls, *([] if self.again is None else [self.again])]
        n_kept = sum(call.tokens.shape[1] for call in calls)
        most = f"{-n_kept} to 0" if n_kept else "0"
        hint = f"make it as RecurrentCache(keeps={-tokens_to_remove}), or continue from a copy.copy(cache) made before"
        fits = -tokens_to_remove <= n_kept
        require(fits, "tokens_to_remove", tokens_to_remove, f"{most}, as many tokens as this cache can take back", hint)
        left = -tokens_to_remove
        self.n_tokens -= left
        while left:
            state, tokens, mask = calls.pop()
            n_stay = max(0, tokens.shape[1] - left)
            left -= tokens.shape[1] - n_stay
            self.state, self.again = state, None
            if n_stay:
                self.again = _Call(state, tokens[:, :n_stay], None if mask is None else mask[:, :n_stay])
        self._calls = tuple(calls) if tokens_to_remove else self._calls

    def update(self, *arguments: Any, **options: Any) -> Any:
        """Refuse keys and values: there are none."""
        raise NotImplementedError("a RecurrentCache holds a state, not keys and values; use put")


def fitting_cache(cache: Cache | None, tokens: Shaped[Tensor, "B L *d_model"]) -> RecurrentCache | None:
    """Return a cache that `tokens` continue. Raises ValueError: it is of another kind, or of other streams."""
    if cache is None:
        return None
    if not isinstance(cache, RecurrentCache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}; expected a RecurrentCache, or None to start a new one"
        )
    if cache.batch_size not in (-1, len(tokens)):
        raise ValueError(
            f"past_key_values is of {cache.batch_size} streams and input_ids of {len(tokens)} rows; for several beams "
            "or continuations of each, use past_key_values.batch_repeat_interleave(n)"
        )
    return cache
