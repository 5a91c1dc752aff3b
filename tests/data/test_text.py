from pathlib import Path

import numpy as np
import pytest
import torch

from recurra.data._text_batches import ExcerptSource, StreamSource
from recurra.data.batches import IGNORED_TARGET, DataSet
from recurra.data.text import TextConfig
from recurra.data.tokenizers import BytePairEncoding, Vocabulary

MIXED = {"source": "shards", "sampling": "windows"}
TRAIN = "".join(f"word{i % 11} word{i % 7}\n" for i in range(100))


@pytest.fixture
def folder(make_corpus):
    return str(make_corpus(train=TRAIN))


def test_a_data_set_of_words(folder):
    data = TextConfig(folder, batch_size=2, segment_length=5).build()
    assert isinstance(data, DataSet)
    assert data.vocab_size == data.output_size == 13
    assert len(data.tokens("train")) == 300
    assert data.decode(data.tokens("train").tolist()) == TRAIN
    assert data.corpus.encoder.encode("word3 bird\n").tolist() == [
        data.corpus.encoder.words.index(word) for word in ("word3", "<unk>", "<eos>")
    ]
    batch = data.source("train").batch(0, 0)
    assert batch.inputs.tolist()[0] == data.tokens("train")[:5].tolist()
    assert data.decode(batch.targets[0]) == "word0\nword1 word1\n"


def test_training_and_evaluation_have_sources_of_their_own(folder):
    config = {"path": folder, "batch_size": 4, "eval_batch_size": 2, "segment_length": 3}
    data = TextConfig(**config).build()
    assert isinstance(data.source("train"), StreamSource)
    assert (data.source("train").batch_size, data.source("valid").batch_size) == (4, 2)
    data = TextConfig(**config, sampling="windows").build()
    assert isinstance(data.source("train"), ExcerptSource)
    for split in ("valid", "test"):
        source = data.source(split)
        assert isinstance(source, StreamSource)
        targets = torch.cat([source.batch(0, step).targets for step in range(len(source))], dim=1)
        counted = targets[targets != IGNORED_TARGET]
        assert counted.tolist() == data.tokens(split)[1:].tolist()


@pytest.mark.parametrize("sampling", ["streams", "windows"])
def test_ranks(folder, sampling):
    config = TextConfig(folder, batch_size=4, eval_batch_size=1, segment_length=3, sampling=sampling)
    whole = config.build().source("train")
    parts = [config.build(rank=rank, world_size=2).source("train") for rank in range(2)]
    assert {len(source) for source in (whole, *parts)} == {len(whole)}
    together = torch.cat([part.batch(1, 2).inputs for part in parts])
    assert torch.equal(together, whole.batch(1, 2).inputs)
    targets = [config.build(rank=rank, world_size=2).source("valid").batch(0, 0).targets for rank in range(2)]
    assert (targets[0] != IGNORED_TARGET).all()
    assert (targets[1] == IGNORED_TARGET).all()
    with pytest.raises(ValueError, match=r"data\.batch_size is 4; expected a multiple of world_size = 3"):
        config.build(rank=0, world_size=3)


def test_bytes_of_a_folder(folder):
    data = TextConfig(folder, vocabulary="bytes").build()
    assert data.vocab_size == 256
    assert bytes(data.tokens("train").tolist()).decode() == TRAIN
    assert data.decode(data.tokens("train").tolist()) == TRAIN
    Path(folder, "train.txt").unlink()
    with pytest.raises(FileNotFoundError, match="no train file"):
        TextConfig(folder, vocabulary="bytes").build()


def test_bpe_trained_and_loaded(folder, tmp_path):
    trained = TextConfig(folder, vocabulary="bpe", bpe_vocab_size=280).build()
    assert trained.decode(trained.tokens("train").tolist()) == TRAIN
    trained.corpus.encoder.save(tmp_path / "tokenizer.json")
    loaded = TextConfig(folder, vocabulary="bpe", tokenizer=str(tmp_path / "tokenizer.json")).build()
    assert isinstance(loaded.corpus.encoder, BytePairEncoding)
    assert loaded.vocab_size == trained.vocab_size
    assert np.array_equal(loaded.tokens("test"), trained.tokens("test"))


def test_a_saved_vocabulary_replaces_the_training_file(make_corpus, tmp_path):
    Vocabulary(["the", "<eos>", "<unk>"]).save(tmp_path / "words.json")
    folder = make_corpus(train=None)
    data = TextConfig(str(folder), tokenizer=str(tmp_path / "words.json")).build()
    assert data.tokens("valid").tolist() == [0, 2, 2, 1]
    with pytest.raises(ValueError, match="split is 'train'; expected one of valid, test"):
        data.source("train")
    with pytest.raises(FileNotFoundError, match=r"data\.path is nowhere, which does not exist; .* set --data\.path"):
        TextConfig("nowhere").build()
    with pytest.raises(FileNotFoundError, match=r"data\.tokenizer is nowhere, which does not exist; .* set --data"):
        TextConfig(str(folder), tokenizer="nowhere").build()


@pytest.mark.parametrize("vocabulary", ["words", "bytes"])
def test_other_vocabularies_ignore_the_size_of_a_byte_pair_encoding(folder, vocabulary):
    """So one word on the command line changes the vocabulary of a recipe."""
    sizes = [TextConfig(folder, vocabulary=vocabulary, bpe_vocab_size=size).build().vocab_size for size in (None, 300)]
    assert sizes[0] == sizes[1]


@pytest.mark.usefixtures("no_type_checker")
@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"vocabulary": "letters"}, ValueError, "vocabulary is 'letters'; expected one of words, bpe"),
        ({"sampling": "all"}, ValueError, "sampling is 'all'; expected one of streams, windows"),
        ({"batch_size": 0}, ValueError, "batch_size is 0; expected at least 1"),
        ({"eval_stride": 3}, ValueError, r"eval_context is None; expected a number .* when data\.eval_stride is 3"),
        ({"eval_context": 4}, ValueError, r"eval_context is 4; expected null when data\.eval_stride is None"),
        ({"seed": 1.0}, TypeError, r"seed is 1\.0, a float; expected a whole number"),
        ({"vocabulary": "bpe"}, ValueError, r"bpe_vocab_size is None; expected the size .*: set it, or set data"),
        ({"length_deviation": -1.0}, ValueError, r"length_deviation is -1\.0; expected 0 or more tokens"),
        ({"half_length_share": 0.1}, ValueError, r"half_length_share is 0\.1; expected 0 without"),
        ({"length_deviation": 5.0, "sampling": "windows"}, ValueError, r"length_deviation is 5\.0; expected 0 unless"),
        ({"sampling": "packed"}, ValueError, "sampling is 'packed'; expected packed only for shards"),
        ({"mixture": {"a": 1.0}}, ValueError, "mixture is "),
        ({**MIXED, "mixture": {"a": float("inf")}}, ValueError, "mixture is .*; expected folders of shards with"),
    ],
)
def test_bad_fields_are_named(fields, error, message):
    with pytest.raises(error, match=rf"^data\.{message}"):
        TextConfig("nowhere", **fields)
