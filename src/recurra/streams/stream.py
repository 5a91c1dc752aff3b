"""Streams through a language model, one or many: text or tokens in, text or tokens out, in constant memory."""

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from recurra.checks import kind_of, require, sentence
from recurra.models.shell import acts_on_calls
from recurra.state import concatenate_alike, map_tensors, select, split
from recurra.streams.continuation import (
    GeneratedText,
    Generation,
    GenerationConfig,
    TextEncoder,
    choose_all,
    encode_first,
    pieces_of_text,
)
from recurra.streams.sampling import SamplingConfig
from recurra.streams.snapshot import (
    ModelIdentity,
    Snapshot,
    StreamState,
    read_snapshot,
    require_same_model,
    write_snapshot,
)

_TOKENS_PER_CALL = 4096
"""Maximum number of tokens, over all streams, in one call of the model: it bounds the memory for a text."""
Input: TypeAlias = str | Sequence[int] | np.ndarray | Tensor
"""What a stream reads: text, if the stream has a tokenizer, or token ids in one dimension."""


class Mark(NamedTuple):
    """A position in a stream of `model` to return to. It refers to the state, so it needs no extra memory."""

    stream: StreamState
    model: nn.Module


class Continued(ABC):
    """A stream that can be continued, with or without drafts from a smaller model."""

    @abstractmethod
    def _tokens(self, config: GenerationConfig) -> Iterator[int]: ...

    @abstractmethod
    def generated_text(self, stop: Sequence[str]) -> GeneratedText:
        """Begin a text that continues the one read and ends before the first of `stop`.

        Raises ValueError without a tokenizer, or if `stop` is not a list of texts.
        """

    def generate(
        self,
        max_tokens: int | None = None,
        *,
        sampling: SamplingConfig | None = None,
        seed: int | torch.Generator = 0,
        stop_tokens: Collection[int] = (),
    ) -> Iterator[int]:
        """Choose tokens one by one; a `Stream` reads each token before it yields it.

        Args:
            max_tokens: maximum number of tokens; None for no limit.
            sampling: how to choose; None draws from the model's own probabilities.
            seed: of the choices, or a generator on the CPU to draw from. Equal streams, settings and seeds give equal
                tokens.
            stop_tokens: generation ends after any of these tokens, which is also yielded.

        Raises:
            TypeError, ValueError: the stream has read nothing yet, an argument is out of range, or the model's outputs
                are not tokens that it can read.
        """
        sampling = sampling or SamplingConfig()
        config = GenerationConfig(max_tokens=max_tokens, sampling=sampling, seed=seed, stop_tokens=stop_tokens)
        return self._tokens(config)

    def generate_text(
        self,
        max_tokens: int | None = None,
        *,
        stop: Sequence[str] = (),
        sampling: SamplingConfig | None = None,
        seed: int | torch.Generator = 0,
    ) -> Iterator[str]:
        """Continue the stream's text piece by piece; other arguments as for `generate`.

        A piece is the text of one token; characters of several tokens are yielded whole. Generation ends at the first
        of the texts in `stop`, which is left out. Raises what `generate` raises, and ValueError if there is no
        tokenizer or a text in `stop` is empty.
        """
        sampling = sampling or SamplingConfig()
        config = GenerationConfig(max_tokens=max_tokens, sampling=sampling, seed=seed, stop=stop)
        return pieces_of_text(self._tokens(config), self.generated_text(config.stop))


class Stream(Continued):
    """A model and the state of one stream through it.

    A stream keeps the model's state, the logits after the last token, its last 64 tokens and its position; for a
    recurrence, their size is constant. None of these is ever changed in place, so forks and snapshots cost nothing.
    Streams compute no gradients. The weights must not change while a stream is in use.

    Args:
        model: called as `model(tokens, state) -> (logits, state)`; in evaluation mode (call `model.eval()` first). To
            load saved streams it also needs `initial_state` and `require_state`, as all our language models have.
        tokenizer: for reading and generating text; its ids are the model's tokens.
        runner: a module to run instead of the model, with the same states and outputs, such as
            `recurra.decoding.prepare` returns. Saved streams belong to the model, so a stream saved with another runner
            can be loaded.

    Raises:
        ValueError: the model is in training mode.
    """

    def __init__(
        self, model: nn.Module, tokenizer: TextEncoder | None = None, *, runner: nn.Module | None = None
    ) -> None:
        require_evaluation_mode(model)
        self.model, self.tokenizer = model, tokenizer
        self.runner = model if runner is None else runner
        self._now = StreamState()
        self._identity: ModelIdentity | None = None

    @property
    def position(self) -> int:
        """Number of tokens read."""
        return self._now.position

    @property
    def state(self) -> Any:
        """The model's state, of batch 1; None at the start of the stream. Calls with gradients can continue from it."""
        # copied if made in inference mode: no call that records gradients would take it
        return map_tensors(lambda tensor: tensor.clone() if tensor.is_inference() else tensor, self._now.model_state)

    @property
    def recent(self) -> tuple[int, ...]:
        """The last tokens, oldest first, at most 64."""
        return self._now.recent

    @property
    def logits(self) -> Float[Tensor, " V"]:
        """A copy of the logits after the last token. Raises ValueError at the start of the stream."""
        if self._now.logits is None:
            raise ValueError(sentence("the stream", "at its start", "one that has read something", "feed it first"))
        return self._now.logits.clone()

    def reset(self) -> None:
        """Go back to the start of the stream."""
        self._now = StreamState()

    def fork(self) -> "Stream":
        """Return a copy of the stream that continues from here independently."""
        twin = Stream(self.model, self.tokenizer, runner=self.runner)
        twin._now, twin._identity = self._now, self._identity
        return twin

    def mark(self) -> Mark:
        """Return a mark for `rewind` at the current position. Unlike a snapshot, a mark cannot be saved."""
        return Mark(self._now, self.model)

    def rewind(self, mark: Mark) -> None:
        """Go exactly to a mark, earlier or later, of this stream or of any other stream of the same model object.

        Raises TypeError if it is not a mark, and ValueError if it is a mark in a stream of another model.
        """
        if not isinstance(mark, Mark):
            raise TypeError(sentence("mark", kind_of(mark), "a mark that stream.mark() returned"))
        if mark.model is not self.model:
            got = f"a place in a stream of another {type(mark.model).__name__}"
            raise ValueError(sentence("mark", got, "one in a stream of this model, with the weights it has now"))
        self._now = mark.stream

    def feed(self, what: Input) -> Float[Tensor, " V"]:
        """Read any number of tokens, or a text, and return the logits after the last token.

        Each text is encoded separately. At the start of the stream, the tokenizer's prefix tokens (<bos>), if any, are
        put before a text. An empty input leaves the stream unchanged.

        Raises:
            ValueError: a text without a tokenizer, a tensor that is not one-dimensional, an empty input at the start of
                the stream, or a model that is now in training mode.
            TypeError: the tokens are not integers.
            IndexError: a token is not in the model's vocabulary.
        """
        if self.model.training:
            require_evaluation_mode(self.model)
        tokens = self.encode(what)
        if len(tokens):
            logits, state = _feed(self.runner, tokens[None], self._now.model_state)
            self.advance(tokens, logits[0], state)
        return self.logits

    def step(self, token: int) -> Float[Tensor, " V"]:
        """Read one token and return the logits after it. Raises what `feed` raises."""
        return self.feed([token])

    def advance(self, tokens: Int[Tensor, " L"], logits: Float[Tensor, " V"], state: Any) -> None:
        """Accept the results of reading `tokens` elsewhere, starting from this stream's state (see `Streams.feed`)."""
        self._now = self._now.after(tokens, logits, state)

    def encode(self, what: Input) -> Int[Tensor, " L"]:
        """Return an input's tokens on the model's device. Raises what `feed` raises."""
        device = next(self.model.parameters()).device
        if isinstance(what, str):
            tokenizer = self._require_tokenizer()
            ids = tokenizer.encode(what) if self.position else encode_first(tokenizer, what)
            return torch.from_numpy(ids).to(device)
        try:
            tokens = what if isinstance(what, Tensor) else torch.as_tensor(what, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(sentence("tokens", repr(what)[:80], "a text, or token ids")) from error
        if tokens.ndim != 1:
            raise ValueError(sentence("tokens", kind_of(tokens), "one dimension: the tokens of one stream"))
        if tokens.numel() and (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool):
            raise TypeError(sentence("tokens", kind_of(tokens), "integers"))
        return tokens.to(device, torch.int64)

    def _tokens(self, config: GenerationConfig) -> Iterator[int]:
        return self._generate(self.generation(config))

    def generation(self, config: GenerationConfig) -> Generation:
        """Begin to continue this stream.

        Raises ValueError if it has read nothing, its outputs are not tokens, or `logit_bias` has a token that it lacks.
        """
        n_outputs = len(self.logits)
        n_tokens = getattr(getattr(self.model, "config", None), "vocab_size", n_outputs)
        if n_outputs != n_tokens:
            got = f"a {type(self.model).__name__} that reads {n_tokens} tokens and predicts {n_outputs} classes"
            raise ValueError(sentence("model", got, "one that predicts the tokens that it reads"))
        last = max(config.sampling.logit_bias, default=0)
        require(last < n_tokens, "a token of logit_bias", last, f"at most {n_tokens - 1}")
        return Generation(config)

    def generated_text(self, stop: Sequence[str]) -> GeneratedText:
        """Begin a text that continues this stream's; arguments and errors as for every `Continued`."""
        return GeneratedText(self._require_tokenizer(), self.recent, GenerationConfig(stop=stop).stop)

    def _generate(self, generation: Generation) -> Iterator[int]:
        while not generation.is_over:
            (token,) = choose_all([generation], self.logits[None], [self.recent])
            self.step(token)
            yield token

    def snapshot(self) -> Snapshot:
        """Return the stream's current state as a value that later calls never change."""
        return Snapshot(self._now, self._model_identity())

    def restore(self, snapshot: Snapshot) -> None:
        """Go to a snapshot, earlier or later. Raises ValueError if it belongs to another model."""
        require_same_model(snapshot.model, self._model_identity(), "the snapshot")
        self._now = snapshot.stream

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the stream's snapshot as a safetensors file, completely or not at all. Raises OSError."""
        write_snapshot(Path(path), self.snapshot())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue from a saved stream.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is damaged, is not a saved stream, or belongs to a model with other settings or
                weights.
        """
        self._now = read_snapshot(Path(path), self.model, self._model_identity()).stream

    def _model_identity(self) -> ModelIdentity:
        if self._identity is None:
            self._identity = ModelIdentity.of(self.model)
        return self._identity

    def _require_tokenizer(self) -> TextEncoder:
        if self.tokenizer is None:
            raise ValueError(sentence("tokenizer", "None", "one, since text needs it", "Stream(model, tokenizer)"))
        return self.tokenizer


def require_evaluation_mode(model: nn.Module) -> None:
    """Refuse a model that is in training mode, wholly or in part: its dropout would be active."""
    if any(module.training for module in model.modules()):
        got = f"a {type(model).__name__} in training mode, where dropout is active"
        raise ValueError(sentence("model", got, "one in evaluation mode", "call model.eval() first"))


@torch.inference_mode()
def _feed(model: nn.Module, tokens: Int[Tensor, "B L"], state: Any = None) -> tuple[Float[Tensor, "B V"], Any]:
    """Feed each stream at least one token; return the logits after the last token, and the state, without gradients."""
    for piece in tokens.split(max(1, _TOKENS_PER_CALL // len(tokens)), 1):
        read, head = _parts(model, piece)
        out, state = read(piece, state)
    return head(out[:, -1]), state


@torch.inference_mode()
def feed_last(
    model: nn.Module, tokens: Int[Tensor, "B L"], state: Any, n_last: int
) -> tuple[Float[Tensor, "B n V"], Any]:
    """Feed each stream tokens in one call; return the logits after its `n_last` last tokens, and the state."""
    read, head = _parts(model, tokens)
    out, state = read(tokens, state)
    return head(out[:, -n_last:]), state


def _parts(model: nn.Module, tokens: Tensor) -> tuple[Callable[..., tuple[Tensor, Any]], Callable[[Tensor], Tensor]]:
    """Return what reads tokens, and what turns chosen steps of its outputs into logits."""
    has_parts = inspect.ismethod(getattr(model, "hidden", None)) and hasattr(model, "head")
    if tokens.shape[1] > 1 and has_parts and not acts_on_calls(model):
        return model.hidden, model.head  # type: ignore[return-value]
    return model, Tensor.clone  # a copy: a view of the last steps would keep those of all steps alive


def feed_together(
    model: nn.Module, texts: Sequence[Int[Tensor, " _"]], states: Sequence[Any]
) -> list[tuple[Float[Tensor, " V"], Any]]:
    """Feed several streams at least one token each, batched where possible; return each one's last logits and state.

    Streams form a batch if their states have the same layout: all streams of a recurrence, and those of a segment-level
    model at the same position in the segment. The batch shrinks whenever a stream reaches the end of its text. Results
    agree with those of a single stream up to rounding: products of several rows round differently.
    """
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))  # the shortest text first
    results: dict[int, tuple[Tensor, Any]] = {}
    for places, state in concatenate_alike([states[number] for number in order]):
        numbers = [order[place] for place in places]
        results.update(zip(numbers, _feed_group(model, [texts[number] for number in numbers], state)))
    return [results[number] for number in range(len(texts))]


def _feed_group(model: nn.Module, texts: Sequence[Tensor], state: Any) -> Iterator[tuple[Tensor, Any]]:
    """Feed the streams of one batched state, the shortest text first."""
    done = n_read = 0
    for length, same_length in groupby(map(len, texts)):
        n_done = len(list(same_length))
        logits, state = _feed(model, torch.stack([text[n_read:length] for text in texts[done:]]), state)
        done, n_read = done + n_done, length
        ended, state = (
            (state, None) if done == len(texts) else (select(state, slice(n_done)), select(state, slice(n_done, None)))
        )
        # Copies: what a stream keeps must not keep the batch alive.
        yield from zip(map(Tensor.clone, logits[:n_done]), split(ended))


_Running: TypeAlias = dict[Hashable, tuple[Stream, Generation]]


class Streams(Mapping[Hashable, Stream]):
    """Streams by name. Each is a `Stream` that can be used alone, or together with others by `feed` and `generate`.

    Args:
        model, tokenizer, runner: as for `Stream`.
    """

    def __init__(
        self, model: nn.Module, tokenizer: TextEncoder | None = None, *, runner: nn.Module | None = None
    ) -> None:
        self._new = Stream(model, tokenizer, runner=runner)
        self._streams: dict[Hashable, Stream] = {}

    @property
    def model(self) -> nn.Module:
        """The model of all streams."""
        return self._new.model

    @property
    def tokenizer(self) -> TextEncoder | None:
        """The tokenizer of all streams."""
        return self._new.tokenizer

    def __getitem__(self, name: Hashable) -> Stream:
        return self._streams[name]

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._streams)

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, name: Hashable) -> Stream:
        """Open a new stream. Raises ValueError if the name is taken."""
        return self._add(name, self._new.fork())

    def fork(self, name: Hashable, twin: Hashable) -> Stream:
        """Fork the stream `name` into a new one, `twin`. Raises KeyError or ValueError like `close` and `open`."""
        return self._add(twin, self._streams[name].fork())

    def close(self, name: Hashable) -> None:
        """Close and remove a stream. Raises KeyError if there is no stream of that name."""
        del self._streams[name]

    def _add(self, name: Hashable, stream: Stream) -> Stream:
        if name in self._streams:
            got = f"{name!r}, an open stream"
            raise ValueError(sentence("name", got, "a new one", "close that stream, or reset it"))
        self._streams[name] = stream
        return stream

    def feed(self, inputs: Mapping[Hashable, Input]) -> dict[Hashable, Float[Tensor, " V"]]:
        """Feed several streams together and return the logits after each one's last token.

        Each stream gets the same result as it would alone, up to the precision of the model's arithmetic;
        `feed_together` says which are batched. An empty input leaves its stream unchanged. If one input is refused, no
        stream reads anything.

        Raises:
            KeyError: there is no stream of that name.
            ValueError, TypeError, IndexError: as `Stream.feed`.
        """
        if self.model.training:
            require_evaluation_mode(self.model)
        tokens = {name: self._streams[name].encode(what) for name, what in inputs.items()}
        fed = {name: self._streams[name] for name in tokens if len(tokens[name])}
        logits = {name: self._streams[name].logits for name in tokens if name not in fed}
        states = [stream.mark().stream.model_state for stream in fed.values()]
        results = feed_together(self._new.runner, [tokens[name] for name in fed], states)
        for (name, stream), result in zip(fed.items(), results):
            stream.advance(tokens[name], *result)
            logits[name] = stream.logits
        return {name: logits[name] for name in inputs}

    def generate(self, configs: Mapping[Hashable, GenerationConfig]) -> Iterator[dict[Hashable, int]]:
        """Continue several streams at once, in rounds: one token for each stream that has not ended.

        Each stream has its own settings and seed and gets the same tokens as from `Stream.generate` alone, up to
        rounding in the model (see `feed`). All streams have read their tokens before a round is yielded. Between
        rounds, streams can be fed, opened and closed; a closed stream is left out of later rounds.

        Raises:
            KeyError: there is no stream of that name.
            ValueError: as `Stream.generate`; or `stop` is set, which only `generate_text` supports.
        """
        for config in configs.values():
            hint = "call generate_text, or set stop_tokens"
            require(not config.stop, "stop", config.stop, "no texts for tokens", hint)
        return self._generate(self._begin(configs))

    def generate_text(self, configs: Mapping[Hashable, GenerationConfig]) -> Iterator[dict[Hashable, str]]:
        """Continue the texts of several streams at once, as `generate` does, and yield them piece by piece.

        A round leaves out streams whose token completes no text yet, and is skipped if no stream is left.
        Errors are those of `generate` and `Stream.generate_text`.
        """
        texts = {name: self[name].generated_text(config.stop) for name, config in configs.items()}
        return self._generate_text(self._begin(configs), texts)

    def _begin(self, configs: Mapping[Hashable, GenerationConfig]) -> _Running:
        return {name: (self[name], self[name].generation(config)) for name, config in configs.items()}

    def _generate(self, running: _Running) -> Iterator[dict[Hashable, int]]:
        while running := {
            name: (stream, generation)
            for name, (stream, generation) in running.items()
            if not generation.is_over and self._streams.get(name) is stream
        }:
            streams, generations = zip(*running.values())
            logits = torch.stack([stream.logits for stream in streams])
            tokens = dict(zip(running, choose_all(generations, logits, [stream.recent for stream in streams])))
            self.feed({name: [token] for name, token in tokens.items()})
            yield tokens

    def _generate_text(
        self, running: _Running, texts: Mapping[Hashable, GeneratedText]
    ) -> Iterator[dict[Hashable, str]]:
        for tokens in self._generate(running):
            pieces = {}
            for name, token in tokens.items():
                text, (_, generation) = texts[name], running[name]
                pieces[name] = text.add(token)
                generation.is_over |= text.is_over
                if generation.is_over:
                    pieces[name] += text.flush()
            if settled := {name: piece for name, piece in pieces.items() if piece}:
                yield settled
