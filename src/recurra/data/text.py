"""Text as a data set: next-token prediction over a corpus in a folder."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, SupportsIndex

import numpy as np

from recurra._choices import Split, VocabularyKind
from recurra._files.digests import json_sha256
from recurra.checks import (
    fields_of,
    require,
    require_literal_fields,
    require_probability,
    require_whole_number,
    sentence,
)
from recurra.data._files import TEXT, saying_cache, user_cache_folder
from recurra.data._text_batches import (
    DrawnLengths,
    ExcerptSource,
    MixtureSource,
    OverlappingSource,
    PackedSource,
    StreamSource,
)
from recurra.data.batches import BatchSource, require_rank
from recurra.data.corpus import ENCODERS, TOKENIZER, ShardCorpus, ShardedTokens, TextCorpus
from recurra.streams.continuation import TextEncoder


@dataclass(frozen=True)
class TextConfig:
    """Next-token prediction over a text file or the text files in a folder.

    Raises TypeError or ValueError, naming the field, for an impossible value.
    """

    path: str
    """A text file, or a folder of .txt files: cut into 90% train, 5% valid and 5% test. Or a folder with the train,
    valid and test files; the file names of PTB and WikiText are recognised. For hf, the name of a data set."""
    vocabulary: VocabularyKind = "words"
    """Whole words, with <unk> and an <eos> at each line end; byte-level byte pair encoding; or bytes."""
    tokenizer: str | None = None
    """Take the vocabulary from this file instead of building it from the training file: a tokenizer.json for "bpe", the
    output of Vocabulary.save for "words"."""
    bpe_vocab_size: int | None = None
    """Size of the byte pair encoding to train on the training file, for "bpe" without a tokenizer; others ignore it."""
    batch_size: int = 16
    """Sequences in a training step, over all ranks together."""
    eval_batch_size: int = 1
    """Streams in an evaluation step, over all ranks together. Every token is predicted once for any value, but the
    first tokens of each stream have no text before them: 1 gives the exact perplexity of the whole text."""
    eval_stride: int | None = None
    """Evaluate in overlapping windows, each predicting this many tokens from a new state; null: in streams."""
    eval_context: int | None = None
    """Tokens that a window reads before those that it predicts; for data.eval_stride. Predicting fewer and reading more
    lowers the perplexity but takes longer: 10 after 130 read a token 14 times."""
    segment_length: int = 256
    """Tokens in a segment; an evaluation step reads one segment of each stream."""
    bptt_segments: int = 1
    """Segments of each sequence in a training step. Gradients flow through all of them, but not through the state
    passed to the next step."""
    length_deviation: float = 0.0
    """For streams: standard deviation of the number of tokens in a training step. With 0, all steps have
    data.segment_length times data.bptt_segments tokens. Otherwise, each epoch draws new lengths around that number and
    scales each step's learning rate by its length relative to it. A model's own segments do not change."""
    half_length_share: float = 0.0
    """Share of the training steps with lengths drawn around half that number; for data.length_deviation."""
    shifted_epochs: bool = False
    """For streams: begin the streams of each epoch at a different token, drawn from those of a step. Segments, and the
    model's memory at each token, then differ between epochs."""
    sampling: Literal["streams", "windows", "packed"] = "streams"
    """Training reads parallel streams in order and carries their state (streams), reads excerpts at random positions
    (windows), or reads documents packed end to end, each as a separate sequence (packed, for shards). Evaluation always
    reads streams."""
    cache: str | None = None
    """Folder for the encoded corpus; null: one in the user's cache folder."""
    seed: int = 0
    """Seed of the random positions, lengths and shifts, and of the order of shards."""
    source: Literal["folder", "shards", "parquet", "jsonl", "hf"] = "folder"
    """Format of data.path: a folder of text files; shards written by `recurra prepare`; or parquet files, JSON lines or
    a data set on the Hugging Face hub, prepared in the cache on first use."""
    text_field: str = "text"
    """For parquet, jsonl and hf: the column with the text."""
    subset: str | None = None
    """For hf: the configuration of the data set."""
    mixture: dict[str, float] = field(default_factory=dict)
    """Train on excerpts from these folders of shards, with these weights; for shards, with data.sampling windows. The
    vocabulary and the evaluation are those of data.path."""

    def __post_init__(self) -> None:
        require_literal_fields(self, "data")
        sizes = fields_of(self, "data", "batch_size", "eval_batch_size", "segment_length", "bptt_segments")
        require_whole_number(1, **sizes, **fields_of(self, "data", "eval_stride"))
        require_whole_number(0, **fields_of(self, "data", "seed", "eval_context"))
        require_whole_number(256, **fields_of(self, "data", "bpe_vocab_size"))
        require_probability(**fields_of(self, "data", "half_length_share"))
        drawn, streams = self.length_deviation > 0, self.sampling == "streams"
        strides = "null" if self.eval_stride is None else "a number of tokens"
        of_files = self.source == "folder"
        mixes = self.source == "shards" and self.sampling == "windows"
        finite = all(weight > 0 and math.isfinite(weight) for weight in self.mixture.values())
        rules = (
            ((self.eval_stride is None) == (self.eval_context is None), "eval_context",
             f"{strides} when data.eval_stride is {self.eval_stride}"),
            (0 <= self.length_deviation < math.inf, "length_deviation", "0 or more tokens"),
            (streams or not drawn, "length_deviation", "0 unless data.sampling is streams"),
            (drawn or not self.half_length_share, "half_length_share", "0 without data.length_deviation"),
            (streams or not self.shifted_epochs, "shifted_epochs", "false unless data.sampling is streams"),
            (not of_files or self.sampling != "packed", "sampling", "packed only for shards"),
            (self.source == "hf" or self.subset is None, "subset", "null unless data.source is hf"),
            (self.source not in ("folder", "shards") or self.text_field == "text", "text_field",
             "text, for data without columns"),
            (mixes or not self.mixture, "mixture", "none unless data.source is shards and data.sampling is windows"),
            (finite, "mixture", "folders of shards with finite weights above 0"),
            (self.bpe_vocab_size is not None or not self._trains_bpe, "bpe_vocab_size",
             "the size of the byte pair encoding to train: set it, or set data.tokenizer to a tokenizer.json"),
        )  # fmt: skip
        for holds, name, expected in rules:
            require(holds, f"data.{name}", getattr(self, name), expected)

    @property
    def _trains_bpe(self) -> bool:
        return self.vocabulary == "bpe" and self.tokenizer is None and self.source != "shards"

    @property
    def _bpe_size(self) -> int | None:
        """The size of the byte pair encoding to train; None if there is none to train."""
        return self.bpe_vocab_size if self._trains_bpe else None

    def build(self, *, rank: int = 0, world_size: int = 1) -> "TextData":
        """Find the corpus, encode it the first time, and open it."""
        require_rank(rank, world_size, self.batch_size)
        if self.tokenizer is not None and not Path(self.tokenizer).expanduser().exists():
            hint = "put it there, or set --data.tokenizer FILE, and --init_from FOLDER for published weights"
            got = f"{self.tokenizer}, which does not exist"
            raise FileNotFoundError(sentence("data.tokenizer", got, "the file of a vocabulary", hint))
        own = None if self.tokenizer is None else self.load_tokenizer(self.tokenizer)
        if self.source != "folder":
            return TextData(self, _open_shards(self, own), rank=rank, world_size=world_size)
        if not Path(self.path).expanduser().exists():
            got, hint = f"{self.path}, which does not exist", "set --data.path"
            raise FileNotFoundError(sentence("data.path", got, TEXT, hint))
        vocabulary: VocabularyKind | TextEncoder = self.vocabulary if own is None else own
        size = self._bpe_size
        corpus = TextCorpus.load(self.path, vocabulary=vocabulary, bpe_vocab_size=size, cache=self.cache)
        return TextData(self, corpus, rank=rank, world_size=world_size)

    def load_tokenizer(self, path: str | Path) -> TextEncoder:
        """Read a vocabulary of this kind without the corpus. Raises OSError, or ValueError for another kind of file."""
        return ENCODERS[self.vocabulary].load(path)


class TextData:
    """A corpus and the batches that a `TextConfig` asks for."""

    def __init__(
        self, config: TextConfig, corpus: TextCorpus | ShardCorpus, *, rank: int = 0, world_size: int = 1
    ) -> None:
        require_rank(rank, world_size, config.batch_size)
        self.config = config
        self.corpus = corpus
        self.cache_folder = corpus.cache_folder
        self.rank = rank
        self.world_size = world_size
        self.vocab_size = len(corpus.encoder)
        self.output_size = self.vocab_size

    def tokens(self, split: Split) -> np.ndarray | ShardedTokens:
        """Return the tokens of a split (see `TextCorpus.tokens`)."""
        return self.corpus.tokens(split)

    def fingerprint(self) -> str:
        """Digest what training and validation read, wherever it lies."""
        own = self.corpus.digests
        return json_sha256([own.get("train"), own.get("valid"), *(mixed.digests["train"] for mixed in self._mixed())])

    def decode(self, tokens: Iterable[SupportsIndex]) -> str:
        """Turn tokens back into text. Raises ValueError for a token outside the vocabulary."""
        return self.corpus.encoder.decode(tokens)

    def source(self, split: Split) -> BatchSource:
        """Return the batches of a split: for training as `sampling` says, for the others all tokens, each once."""
        config, seed, training = self.config, self.config.seed, split == "train"
        n_steps = config.segment_length * (config.bptt_segments if training else 1)
        batch_size = config.batch_size if training else config.eval_batch_size
        shares: dict[str, int] = {"batch_size": batch_size, "rank": self.rank, "world_size": self.world_size}
        sharded = self.corpus if isinstance(self.corpus, ShardCorpus) else None
        if training and sharded is not None and config.mixture:
            texts, weights = [corpus.tokens("train") for corpus in self._mixed()], list(config.mixture.values())
            return MixtureSource(texts, weights, segment_length=n_steps, seed=seed, **shares)
        if training and sharded is not None and config.sampling == "packed":
            return PackedSource(sharded.tokens("train"), row_length=n_steps, seed=seed, **shares)
        tokens = self.tokens(split)
        if training and config.sampling == "windows":
            return ExcerptSource(tokens, segment_length=n_steps, seed=seed, **shares)
        if not training and config.eval_stride is not None:
            assert config.eval_context is not None  # the config refuses one without the other
            return OverlappingSource(tokens, stride=config.eval_stride, context=config.eval_context, **shares)
        drawn = None
        if config.length_deviation:
            drawn = DrawnLengths(n_steps, config.length_deviation, config.half_length_share, seed)
        return StreamSource(
            tokens,
            segment_length=n_steps,
            training=training,
            drawn=drawn,
            shuffle_seed=None if sharded is None else seed,
            shift_seed=seed if config.shifted_epochs else None,
            **shares,
        )

    def _mixed(self) -> list[ShardCorpus]:
        corpora = [ShardCorpus(Path(path).expanduser()) for path in self.config.mixture]
        for path, corpus in zip(self.config.mixture, corpora):
            if corpus.encoder.fingerprint != self.corpus.encoder.fingerprint:
                got, hint = f"{path}, whose vocabulary is another one", "prepare it with --tokenizer"
                expected = f"shards with the vocabulary of {self.config.path}"
                raise ValueError(sentence("data.mixture", got, expected, hint))
        return corpora


def _open_shards(config: TextConfig, encoder: TextEncoder | None) -> ShardCorpus:
    """Open a prepared corpus with this vocabulary (None: any); other sources are prepared first, in the cache."""
    folder = Path(config.path).expanduser() if config.source == "shards" else _prepared(config)
    corpus = ShardCorpus(folder)
    if corpus.vocabulary != config.vocabulary:  # a run reads its tokenizer by what its settings say
        expected = f"{corpus.vocabulary}, as the shards in {folder} have"
        raise ValueError(sentence("data.vocabulary", config.vocabulary, expected))
    if encoder is not None and corpus.encoder.fingerprint != encoder.fingerprint:
        got, hint = f"{folder}, whose vocabulary is another one", "prepare the corpus with --tokenizer"
        raise ValueError(sentence("data.path", got, "shards of that vocabulary", hint))
    return corpus


def has_prepared(config: TextConfig, vocabulary: TextEncoder) -> bool:
    """Say whether the cache has the shards of parquet, jsonl or hf, with this vocabulary."""
    tokenizer = _shards_folder(config) / TOKENIZER
    return tokenizer.is_file() and config.load_tokenizer(tokenizer).fingerprint == vocabulary.fingerprint


def _shards_folder(config: TextConfig) -> Path:
    from recurra.data._documents import corpus_path, training_identity

    assert config.source != "folder"
    assert config.source != "shards"
    path = corpus_path(config.source, config.path)
    training = training_identity(config.source, config.path)  # of which a vocabulary is made
    words = (config.source, path, training, config.subset, config.text_field, config.vocabulary, config._bpe_size)
    own = None if config.tokenizer is None else config.load_tokenizer(config.tokenizer).fingerprint
    key = hashlib.sha256("\n".join(map(str, (*words, own))).encode()).hexdigest()[:16]
    return (user_cache_folder() if config.cache is None else Path(config.cache).expanduser()) / f"shards-{key}"


def _prepared(config: TextConfig) -> Path:
    from recurra.data._prepare import Preparation, prepare

    assert config.source != "folder"
    assert config.source != "shards"
    folder = _shards_folder(config)
    what = Preparation(
        source=config.source,
        path=config.path,
        out=folder,
        vocabulary=config.vocabulary,
        vocab_size=config._bpe_size,
        tokenizer=None if config.tokenizer is None else Path(config.tokenizer).expanduser(),
        name=config.subset,
        field=config.text_field,
    )
    with saying_cache(folder):
        prepare(what)
    return folder
