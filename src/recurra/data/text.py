"""Text as a data set: next-token prediction over a corpus in a folder."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, SupportsIndex

import numpy as np

from recurra.data.batches import BatchSource, Split
from recurra.data.bpe import BytePairEncoding
from recurra.data.corpus import TextCorpus, TextEncoder
from recurra.data.fields import require_choice, require_rank, require_whole_number
from recurra.data.text_batches import StreamSource, WindowSource
from recurra.data.vocabulary import Vocabulary

_OWNER = "TextConfig"


@dataclass(frozen=True)
class TextConfig:
    """Next-token prediction over the text files in a folder.

    Raises TypeError or ValueError, naming the field, for a value that cannot be.
    """

    path: str
    """Folder with the train, valid and test files; PTB's and WikiText's own names are known."""
    vocabulary: Literal["words", "bpe"] = "words"
    """Whole words with <eos> at each line end and <unk>, or byte-level byte pair encoding."""
    tokenizer: str | None = None
    """File to take the vocabulary from instead of making one from the training file: a tokenizer.json for
    "bpe", the output of Vocabulary.save for "words"."""
    bpe_vocab_size: int | None = None
    """Size of the byte pair encoding trained on the training file; for "bpe" without a tokenizer."""
    batch_size: int = 16
    """Rows of a training step, over all ranks together."""
    eval_batch_size: int = 1
    """Rows of an evaluation step, over all ranks together. Every token is predicted once whatever it is, but
    the first tokens of each row have no text before them: 1 gives the exact perplexity of the whole text."""
    segment_length: int = 256
    """Tokens of a segment; a row of an evaluation step is one segment."""
    bptt_segments: int = 1
    """Segments of a row in a training step. Gradients flow through all of them; the state that a step leaves for
    the next one has none."""
    sampling: Literal["streams", "windows"] = "streams"
    """Training reads contiguous streams in order, their state carried, or windows at random places.
    Evaluation always reads streams."""
    cache: str | None = None
    """Folder for the encoded corpus; by default .recurra beside the data, or the user's cache folder where
    that cannot be written."""
    seed: int = 0
    """Draws the windows; streams have no randomness."""

    def __post_init__(self) -> None:
        require_choice(_OWNER, "vocabulary", self.vocabulary, ("words", "bpe"))
        require_choice(_OWNER, "sampling", self.sampling, ("streams", "windows"))
        for field in ("batch_size", "eval_batch_size", "segment_length", "bptt_segments"):
            require_whole_number(_OWNER, field, getattr(self, field), 1)
        require_whole_number(_OWNER, "seed", self.seed, 0)
        if self.bpe_vocab_size is not None:
            require_whole_number(_OWNER, "bpe_vocab_size", self.bpe_vocab_size, 256)
        wants_size = self.vocabulary == "bpe" and self.tokenizer is None
        if wants_size and self.bpe_vocab_size is None:
            raise ValueError(
                f"{_OWNER}.vocabulary 'bpe' needs a tokenizer (a tokenizer.json) or a bpe_vocab_size "
                "(to train one), got neither"
            )
        if not wants_size and self.bpe_vocab_size is not None:
            raise ValueError(
                f"{_OWNER}.bpe_vocab_size is for vocabulary 'bpe' without a tokenizer, "
                f"got {self.bpe_vocab_size} with vocabulary {self.vocabulary!r} "
                f"and tokenizer {self.tokenizer!r}"
            )

    def build(self, *, rank: int = 0, world_size: int = 1) -> "TextData":
        """Find, encode (the first time) and open the corpus.

        Raises ValueError where `world_size` does not divide `batch_size`, and as `TextCorpus.load` says.
        """
        require_rank(_OWNER, rank, world_size, self.batch_size)
        vocabulary: Literal["words", "bpe"] | TextEncoder = self.vocabulary
        if self.tokenizer is not None:
            vocabulary = self.load_tokenizer(self.tokenizer)
        corpus = TextCorpus.load(self.path, vocabulary=vocabulary, bpe_vocab_size=self.bpe_vocab_size, cache=self.cache)
        return TextData(self, corpus, rank=rank, world_size=world_size)

    def load_tokenizer(self, path: str | Path) -> TextEncoder:
        """Read a vocabulary of this kind without the corpus. Raises OSError, and ValueError for a foreign file."""
        return BytePairEncoding.load(path) if self.vocabulary == "bpe" else Vocabulary.load(path)


class TextData:
    """A corpus and the batches that a `TextConfig` asks for."""

    def __init__(self, config: TextConfig, corpus: TextCorpus, *, rank: int = 0, world_size: int = 1) -> None:
        require_rank(_OWNER, rank, world_size, config.batch_size)
        self.config = config
        self.corpus = corpus
        self.rank = rank
        self.world_size = world_size
        self.vocab_size = len(corpus.encoder)
        self.output_size = self.vocab_size

    def tokens(self, split: Split) -> np.ndarray:
        """The numbers of a split (see `TextCorpus.tokens`)."""
        return self.corpus.tokens(split)

    def encode(self, text: str) -> np.ndarray:
        """The numbers of a text: (n,) int64."""
        return self.corpus.encoder.encode(text)

    def decode(self, tokens: Iterable[SupportsIndex]) -> str:
        """The text of the numbers. Raises ValueError for one outside the vocabulary."""
        return self.corpus.encoder.decode(tokens)

    def save_tokenizer(self, path: Path) -> None:
        """Write the vocabulary as `TextConfig.load_tokenizer` reads it. Raises OSError."""
        encoder = self.corpus.encoder
        assert isinstance(encoder, (Vocabulary, BytePairEncoding))  # what `TextConfig.build` makes
        encoder.save(path)

    def source(self, split: Split) -> BatchSource:
        """The batches of a split: training as `sampling` says, the others as streams that leave nothing out.

        Raises ValueError for a split that is not there or too short for the batch.
        """
        config = self.config
        training = split == "train"
        n_steps = config.segment_length * (config.bptt_segments if training else 1)
        if training and config.sampling == "windows":
            return WindowSource(
                self.tokens(split),
                batch_size=config.batch_size,
                segment_length=n_steps,
                seed=config.seed,
                rank=self.rank,
                world_size=self.world_size,
            )
        return StreamSource(
            self.tokens(split),
            batch_size=config.batch_size if training else config.eval_batch_size,
            segment_length=n_steps,
            training=training,
            rank=self.rank,
            world_size=self.world_size,
        )
