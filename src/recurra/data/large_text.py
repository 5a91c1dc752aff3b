"""Opens the corpora that are not a folder of text files: shards, and what is turned into shards on first use."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from recurra.checks import sentence
from recurra.data.batches import BatchSource
from recurra.data.cache import saying_cache, user_cache_folder
from recurra.data.corpus import TextEncoder
from recurra.data.documents import corpus_path, training_identity
from recurra.data.mixture import MixtureSource
from recurra.data.packed_batches import PackedSource
from recurra.data.prepare import Preparation, prepare
from recurra.data.shards import TOKENIZER, ShardCorpus

if TYPE_CHECKING:
    from recurra.data.text import TextConfig


def open_shards(config: "TextConfig", encoder: TextEncoder | None) -> ShardCorpus:
    """Open a prepared corpus; parquet, jsonl and hf are prepared first, in the cache.

    Args:
        config: says where it is.
        encoder: the vocabulary that it has to have; None takes any.

    Raises:
        OSError, ValueError: as `prepare` and `ShardCorpus`; or the vocabulary is another one.
    """
    folder = Path(config.path).expanduser()
    if config.source != "shards":
        folder = _prepared(config)
    corpus = ShardCorpus(folder)
    if corpus.vocabulary != config.vocabulary:  # a run reads its tokenizer by what its settings say
        expected = f"{corpus.vocabulary}, as the shards in {folder} have"
        raise ValueError(sentence("data.vocabulary", config.vocabulary, expected))
    if encoder is not None and corpus.encoder.fingerprint != encoder.fingerprint:
        came, mend = f"{folder}, whose vocabulary is another one", "prepare the corpus with --tokenizer"
        raise ValueError(sentence("data.path", came, "shards of that vocabulary", mend))
    return corpus


def packed_source(config: "TextConfig", corpus: ShardCorpus, rank: int, world_size: int) -> BatchSource:
    """Return the packed documents of the training split."""
    return PackedSource(
        corpus.tokens("train"),
        batch_size=config.batch_size,
        row_length=config.segment_length * config.bptt_segments,
        seed=config.seed,
        rank=rank,
        world_size=world_size,
    )


def mixture_source(config: "TextConfig", corpus: ShardCorpus, rank: int, world_size: int) -> BatchSource:
    """Return excerpts from the training splits of several prepared corpora.

    Raises:
        ValueError: one of them has another vocabulary.
    """
    corpora = []
    for path in config.mixture:
        corpora.append(ShardCorpus(Path(path).expanduser()))
        if corpora[-1].encoder.fingerprint != corpus.encoder.fingerprint:
            came, mend = f"{path}, whose vocabulary is another one", "prepare it with --tokenizer"
            raise ValueError(sentence("data.mixture", came, f"shards with the vocabulary of {config.path}", mend))
    return MixtureSource(
        [one.tokens("train") for one in corpora],
        list(config.mixture.values()),
        batch_size=config.batch_size,
        segment_length=config.segment_length * config.bptt_segments,
        seed=config.seed,
        rank=rank,
        world_size=world_size,
    )


def has_prepared(config: "TextConfig", vocabulary: TextEncoder) -> bool:
    """Say whether the cache has the shards of parquet, jsonl or hf, with this vocabulary."""
    tokenizer = shards_folder(config) / TOKENIZER
    return tokenizer.is_file() and config.load_tokenizer(tokenizer).fingerprint == vocabulary.fingerprint


def shards_folder(config: "TextConfig") -> Path:
    """Name the folder of the cache into which a corpus is prepared."""
    assert config.source != "folder"
    assert config.source != "shards"
    path = corpus_path(config.source, config.path)
    training = training_identity(config.source, config.path)  # of which a vocabulary is made
    words = (config.source, path, training, config.subset, config.text_field, config.vocabulary, config.bpe_vocab_size)
    own = None if config.tokenizer is None else config.load_tokenizer(config.tokenizer).fingerprint
    key = hashlib.sha256("\n".join(map(str, (*words, own))).encode()).hexdigest()[:16]
    return (user_cache_folder() if config.cache is None else Path(config.cache).expanduser()) / f"shards-{key}"


def _prepared(config: "TextConfig") -> Path:
    assert config.source != "folder"
    assert config.source != "shards"
    folder = shards_folder(config)
    what = Preparation(
        source=config.source,
        path=config.path,
        out=folder,
        vocabulary=config.vocabulary,
        vocab_size=config.bpe_vocab_size,
        tokenizer=None if config.tokenizer is None else Path(config.tokenizer).expanduser(),
        name=config.subset,
        field=config.text_field,
    )
    with saying_cache(folder):
        prepare(what)
    return folder
