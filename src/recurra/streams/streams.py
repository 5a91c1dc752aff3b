"""Many streams through one model, each with a start and an end of its own, fed and continued together."""

from collections.abc import Hashable, Iterator, Mapping
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import require, sentence
from recurra.streams.continuation import GeneratedText, Generation, GenerationConfig, Tokenizer, choose_all
from recurra.streams.stream import FeedRequest, Input, Stream, feed_together, require_evaluation_mode

_Running: TypeAlias = dict[Hashable, tuple[Stream, Generation]]


class Streams(Mapping[Hashable, Stream]):
    """Streams by name. Each is a `Stream`, which can be used alone or, with `feed` and `generate`, beside others.

    Args:
        model, tokenizer, runner: as for `Stream`.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer | None = None, *, runner: nn.Module | None = None
    ) -> None:
        self._new = Stream(model, tokenizer, runner=runner)
        self._streams: dict[Hashable, Stream] = {}

    @property
    def model(self) -> nn.Module:
        """The model of all streams."""
        return self._new.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of all streams."""
        return self._new.tokenizer

    def __getitem__(self, name: Hashable) -> Stream:
        return self._streams[name]

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._streams)

    def __len__(self) -> int:
        return len(self._streams)

    # --- coming and going ---

    def open(self, name: Hashable) -> Stream:
        """Start a stream. Raises ValueError if the name is taken."""
        return self._add(name, self._new.fork())

    def fork(self, name: Hashable, twin: Hashable) -> Stream:
        """Start the stream `twin` where `name` is now. Raises KeyError or ValueError as `close` and `open`."""
        return self._add(twin, self._streams[name].fork())

    def close(self, name: Hashable) -> None:
        """End a stream and forget it. Raises KeyError if there is none of that name."""
        del self._streams[name]

    def _add(self, name: Hashable, stream: Stream) -> Stream:
        if name in self._streams:
            got = f"{name!r}, an open stream"
            raise ValueError(sentence("name", got, "a new one", "close that stream, or reset it"))
        self._streams[name] = stream
        return stream

    # --- in ---

    def feed(self, inputs: Mapping[Hashable, Input]) -> dict[Hashable, Float[Tensor, " V"]]:
        """Feed several streams side by side and give the logits after each one's last token.

        Each stream gets the result that it would get alone, to the precision of the model's arithmetic; `feed_together`
        says which are batched. An empty input leaves its stream unchanged. If one input is refused, no stream has read
        anything.

        Raises:
            KeyError: there is no stream of that name.
            ValueError, TypeError, IndexError: as `Stream.feed`.
        """
        if self.model.training:
            require_evaluation_mode(self.model)
        tokens = {name: self._streams[name].encode(what) for name, what in inputs.items()}
        fed = {name: self._streams[name] for name in tokens if len(tokens[name])}
        logits = {name: self._streams[name].logits for name in tokens if name not in fed}
        requests = [FeedRequest(tokens[name], stream.mark().stream.model_state) for name, stream in fed.items()]
        for (name, stream), result in zip(fed.items(), feed_together(self._new.runner, requests)):
            stream.advance(tokens[name], *result)
            logits[name] = stream.logits
        return {name: logits[name] for name in inputs}

    # --- out ---

    def generate(self, configs: Mapping[Hashable, GenerationConfig]) -> Iterator[dict[Hashable, int]]:
        """Continue several streams side by side, in rounds: one token for each stream that has not ended.

        Each stream chooses with its own settings and seed and gets the tokens that `Stream.generate` would give it
        alone, as far as the model's arithmetic is the same (see `feed`). All have read their tokens before a round is
        given out. Between rounds streams may be fed, opened and closed; one that is closed takes no further part.

        Raises:
            KeyError: there is no stream of that name.
            ValueError: as `Stream.generate`; or `stop` has texts, which `generate_text` ends at.
        """
        for config in configs.values():
            hint = "call generate_text, or set stop_tokens"
            require(not config.stop, "stop", config.stop, "no texts for tokens", hint)
        return self._generate(self._begin(configs))

    def generate_text(self, configs: Mapping[Hashable, GenerationConfig]) -> Iterator[dict[Hashable, str]]:
        """Continue the texts of several streams side by side, as `generate` does, and give them out piece by piece.

        A round leaves out the streams whose token settles no text yet, and is itself left out if there are no others.
        Errors are those of `generate` and `Stream.generate_text`.
        """
        texts = {name: self[name].generated_text(config.stop) for name, config in configs.items()}
        return self._generate_text(self._begin(configs), texts)

    def _begin(self, configs: Mapping[Hashable, GenerationConfig]) -> _Running:
        return {name: (self[name], self[name].generation(config)) for name, config in configs.items()}

    def _generate(self, running: _Running) -> Iterator[dict[Hashable, int]]:
        while running := self._still(running):
            streams, generations = zip(*running.values())
            logits = torch.stack([stream.logits for stream in streams])
            tokens = dict(zip(running, choose_all(generations, logits, [stream.recent for stream in streams])))
            self.feed({name: [token] for name, token in tokens.items()})
            yield tokens

    def _still(self, running: _Running) -> _Running:
        return {
            name: (stream, generation)
            for name, (stream, generation) in running.items()
            if not generation.is_over and self._streams.get(name) is stream
        }

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
