"""One stream through a language model: text or tokens in, text or tokens out, in constant memory."""

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from recurra.data import TextEncoder
from recurra.decoding import prepare_for_decoding
from recurra.generation.model_identity import ModelIdentity
from recurra.generation.reading import read, require_evaluation_mode
from recurra.generation.sampling import SamplingConfig, sample
from recurra.generation.snapshot import Snapshot, read_snapshot, require_same_model, write_snapshot
from recurra.generation.standing import Standing
from recurra.generation.stop_text import StopText
from recurra.generation.text_pieces import TextPieces

Input: TypeAlias = str | Sequence[int] | np.ndarray | Tensor
"""What a stream reads: a text, for a stream with a tokenizer, or token ids, one-dimensional."""


class Stream:
    """A model and the state of one stream through it.

    What a stream keeps is the model's state, the logits after the last token, its last 64 tokens and its position. For
    a recurrence that is the same however long the stream is. All of it is values that are never changed in place, so
    twins and snapshots cost nothing. There are no gradients.

    The weights are taken to stay as they are while the stream lives. A model that makes matrices from its parameters at
    every call (the NCGRU) makes them once inside of `torch.nn.utils.parametrize.cached()`, in which a loop over the
    steps is best put.

    Args:
        model: called as `model(tokens, state) -> (logits, state)`; in evaluation mode, into which it is not put by
            itself.
        tokenizer: for feeding and generating text; one whose numbers are the model's tokens.
        weights: run a copy of the model made for decoding on a CPU, its weights kept as "float32", "bfloat16" or "int8"
            (see `recurra.decoding.prepare_for_decoding`); float32 gives the model's results but for the order of sums.
            None runs the model itself. States are the same form, and may be saved with one and loaded with another.

    Raises:
        ValueError: the model is in training mode; or there are no such weights, or the model is not float32 on the CPU.
    """

    def __init__(self, model: nn.Module, tokenizer: TextEncoder | None = None, *, weights: str | None = None) -> None:
        require_evaluation_mode(model)
        self.model, self.tokenizer = model, tokenizer
        self._runs = model if weights is None else prepare_for_decoding(model, weights)
        self._at = Standing()
        self._identity: ModelIdentity | None = None

    # --- where it stands ---

    @property
    def position(self) -> int:
        """How many tokens were read."""
        return self._at.position

    @property
    def state(self) -> Any:
        """The model's state, of batch 1; None at the start of the stream."""
        return self._at.state

    @property
    def logits(self) -> Float[Tensor, " V"]:
        """The logits after the last token, a copy. Raises ValueError at the start of the stream."""
        if self._at.logits is None:
            raise ValueError("the stream has read nothing yet, so there is nothing to go on from; feed it first")
        return self._at.logits.clone()

    def reset(self) -> None:
        """Go back to the start of a stream."""
        self._at = Standing()

    def fork(self) -> "Stream":
        """Give a twin that stands where this stream stands and goes its own way."""
        twin = Stream(self.model, self.tokenizer)
        twin._runs, twin._at, twin._identity = self._runs, self._at, self._identity
        return twin

    # --- in ---

    def feed(self, what: Input) -> Float[Tensor, " V"]:
        """Read any number of tokens, or a text, and give the logits after the last.

        A text is encoded by itself: a word, or a piece of a byte pair encoding, does not reach over two calls. An empty
        input leaves the stream where it is.

        Raises:
            ValueError: a text for a stream without tokenizer, a tensor of another rank than 1, nothing read so far at
                all, or the model has been put in training mode.
            TypeError: numbers that are not whole.
            IndexError: a token is not in the model's vocabulary.
        """
        if self.model.training:
            require_evaluation_mode(self.model)
        tokens = self.encode(what)
        if len(tokens):
            logits, state = read(self._runs, tokens[None], self._at.state)
            self.advance(tokens, logits[0], state)
        return self.logits

    def step(self, token: int) -> Float[Tensor, " V"]:
        """Read one token and give the logits after it; errors as `feed`."""
        return self.feed([token])

    def advance(self, tokens: Int[Tensor, " L"], logits: Float[Tensor, " V"], state: Any) -> None:
        """Take over what reading `tokens` elsewhere has come to, from this stream's state on (see `Streams.feed`)."""
        self._at = self._at.after(tokens, logits, state)

    def encode(self, what: Input) -> Int[Tensor, " L"]:
        """Give an input's tokens on the model's device; errors as `feed`."""
        device = next(self.model.parameters()).device
        if isinstance(what, str):
            return torch.from_numpy(self._require_tokenizer().encode(what)).to(device)
        tokens = torch.as_tensor(what)
        if tokens.ndim != 1:
            raise ValueError(f"tokens are of shape {tuple(tokens.shape)}; expected one dimension: one stream's tokens")
        if tokens.numel() and (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool):
            raise TypeError(f"tokens are of type {tokens.dtype}; expected whole numbers")
        return tokens.to(device, torch.int64)

    # --- out ---

    def generate(
        self,
        max_tokens: int | None = None,
        *,
        sampling: SamplingConfig | None = None,
        seed: int | torch.Generator = 0,
        stop_tokens: Collection[int] = (),
    ) -> Iterator[int]:
        """Choose tokens, one after the other, each of which the stream reads before it is given out.

        Args:
            max_tokens: how many; None goes on without end.
            sampling: how to choose; None draws by the model's own probabilities.
            seed: of the choices, or a generator on the CPU to go on with. Equal streams, settings and seeds give equal
                tokens.
            stop_tokens: ends after one of these, which is given out, too.

        Raises:
            ValueError: the stream has read nothing yet, max_tokens is below 1, or the model's outputs are no tokens
                that it could read.
        """
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; expected at least 1, or None for a stream without end")
        self._require_tokens_as_outputs()
        generator = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
        return self._generate(max_tokens, sampling or SamplingConfig(), generator, frozenset(stop_tokens))

    def generate_text(
        self,
        max_tokens: int | None = None,
        *,
        stop: Sequence[str] = (),
        sampling: SamplingConfig | None = None,
        seed: int | torch.Generator = 0,
    ) -> Iterator[str]:
        """Go on with the stream's text and give it out piece by piece; other arguments as `generate`.

        A piece is a token's text, with words also the blank before it; letters are given out whole.

        Args:
            max_tokens: how many tokens; None goes on without end.
            stop: texts to end at; the first to appear is left out. The stream has read it.
            sampling: how to choose.
            seed: of the choices.

        Raises:
            ValueError: as `generate`; the stream has no tokenizer; or a text to stop at is empty.
        """
        pieces = TextPieces(self._require_tokenizer(), before=self._at.recent)
        return _text(self.generate(max_tokens, sampling=sampling, seed=seed), pieces, StopText(stop))

    def _generate(
        self,
        max_tokens: int | None,
        sampling: SamplingConfig,
        generator: torch.Generator,
        stop_tokens: frozenset[int],
    ) -> Iterator[int]:
        n_tokens = 0
        while max_tokens is None or n_tokens < max_tokens:
            token = int(sample(self.logits.cpu(), sampling, generator, torch.tensor(self._at.recent)))
            self.step(token)
            yield token
            if token in stop_tokens:
                return
            n_tokens += 1

    # --- kept ---

    def snapshot(self) -> Snapshot:
        """Give the stream as it is at this moment; what it does later does not change that."""
        return Snapshot(self._at, self._model_identity())

    def restore(self, snapshot: Snapshot) -> None:
        """Go to where a snapshot was taken. Raises ValueError for one of another model."""
        require_same_model(snapshot.model, self._model_identity(), "the snapshot")
        self._at = snapshot.at

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the stream's snapshot as a safetensors file, which is there whole or not at all. Raises OSError."""
        write_snapshot(Path(path), self.snapshot())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go to where a saved stream stood.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is damaged, foreign or of another model: other settings, or other weights.
        """
        self._at = read_snapshot(Path(path), self.model, self._model_identity()).at

    # --- checks ---

    def _model_identity(self) -> ModelIdentity:
        if self._identity is None:
            self._identity = ModelIdentity.of(self.model)
        return self._identity

    def _require_tokenizer(self) -> TextEncoder:
        if self.tokenizer is None:
            raise ValueError("the stream has no tokenizer, which text needs: Stream(model, tokenizer)")
        return self.tokenizer

    def _require_tokens_as_outputs(self) -> None:
        n_outputs = len(self.logits)
        n_tokens = getattr(getattr(self.model, "config", None), "vocab_size", n_outputs)
        if n_outputs != n_tokens:
            raise ValueError(
                f"the {type(self.model).__name__} reads {n_tokens} tokens and predicts {n_outputs} classes, which are "
                "no tokens to go on with; expected a model with as many outputs as inputs"
            )


def _text(tokens: Iterator[int], pieces: TextPieces, stop: StopText) -> Iterator[str]:
    for token in tokens:
        if text := stop.add(pieces.add(token)):
            yield text
        if stop.found:
            return
    if text := stop.add(pieces.flush()) + stop.flush():
        yield text
