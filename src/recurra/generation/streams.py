"""Many streams through one model, each with a start and an end of its own, fed together."""

from collections.abc import Hashable, Iterator, Mapping

from jaxtyping import Float
from torch import Tensor, nn

from recurra.data import TextEncoder
from recurra.generation.reading import Reading, read_together, require_evaluation_mode
from recurra.generation.stream import Input, Stream


class Streams(Mapping[Hashable, Stream]):
    """Streams by name. Every one is a `Stream` of its own, to be used alone or, with `feed`, beside others.

    Args:
        model: as for `Stream`.
        tokenizer: as for `Stream`.

    Raises:
        ValueError: the model is in training mode.
    """

    def __init__(self, model: nn.Module, tokenizer: TextEncoder | None = None) -> None:
        require_evaluation_mode(model)
        self.model, self.tokenizer = model, tokenizer
        self._streams: dict[Hashable, Stream] = {}

    def __getitem__(self, name: Hashable) -> Stream:
        return self._streams[name]

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._streams)

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, name: Hashable) -> Stream:
        """Start a stream. Raises ValueError where there is one of that name."""
        return self._add(name, Stream(self.model, self.tokenizer))

    def fork(self, name: Hashable, twin: Hashable) -> Stream:
        """Start the stream `twin` where `name` stands.

        Raises:
            KeyError: there is no stream `name`.
            ValueError: there is a stream `twin`.
        """
        return self._add(twin, self._streams[name].fork())

    def close(self, name: Hashable) -> None:
        """End a stream and forget it. Raises KeyError where there is none of that name."""
        del self._streams[name]

    def feed(self, inputs: Mapping[Hashable, Input]) -> dict[Hashable, Float[Tensor, " V"]]:
        """Feed several streams side by side and give the logits after each one's last token.

        Every stream comes out as if it had been fed alone, to the precision of the model's arithmetic. Texts may be of
        any lengths; `recurra.generation.reading.read_together` says what is batched with what. If one of the inputs is
        refused, no stream has read anything.

        Args:
            inputs: what to read, by the streams' names. An empty input leaves its stream where it is.

        Raises:
            KeyError: there is no stream of that name.
            ValueError, TypeError, IndexError: as `Stream.feed`.
        """
        if self.model.training:
            require_evaluation_mode(self.model)
        tokens = {name: self._streams[name].encode(what) for name, what in inputs.items()}
        fed = {name: self._streams[name] for name in tokens if len(tokens[name])}
        logits = {name: self._streams[name].logits for name in tokens if name not in fed}
        results = read_together(self.model, [Reading(tokens[name], stream.state) for name, stream in fed.items()])
        for (name, stream), result in zip(fed.items(), results):
            stream.advance(tokens[name], *result)
            logits[name] = stream.logits
        return {name: logits[name] for name in inputs}

    def _add(self, name: Hashable, stream: Stream) -> Stream:
        if name in self._streams:
            raise ValueError(f"there is a stream {name!r} already; close it first, or reset it")
        self._streams[name] = stream
        return stream
