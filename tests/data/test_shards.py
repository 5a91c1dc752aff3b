"""Corpora as shards: prepared whole, in parts or again after a kill, and read as one text in any order."""

import gzip
import json
import multiprocessing
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from recurra._files.writing import locked
from recurra.data import _documents as documents
from recurra.data import _prepare as preparing
from recurra.data._documents import find_units
from recurra.data._prepare import Preparation, prepare
from recurra.data.batches import IGNORED_TARGET
from recurra.data.corpus import ShardCorpus, ShardedTokens
from recurra.data.text import TextConfig
from recurra.data.tokenizers import Vocabulary
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.train.evaluate import evaluate

SPLITS = {"train": 60, "valid": 9, "test": 5}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr("recurra.data._documents._PIECE_BYTES", 300)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for split, n_lines in SPLITS.items():
        lines = (" ".join(f"w{(i * i + j) % 17}" for j in range(3 + i % 5)) for i in range(n_lines))
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


def text_of(corpus, split="train"):
    return (corpus / f"{split}.txt").read_text()


@pytest.mark.parametrize(("vocabulary", "size"), [("words", None), ("bpe", 300), ("bytes", None)])
def test_the_shards_are_the_text(corpus, tmp_path, vocabulary, size):
    what = Preparation("folder", str(corpus), tmp_path / "out", vocabulary=vocabulary, vocab_size=size)
    assert len(prepare(what)["splits"]["train"]) > 3
    shards = ShardCorpus(tmp_path / "out")
    for split, n_lines in SPLITS.items():
        tokens = shards.tokens(split)
        assert shards.encoder.decode(tokens[:]) == text_of(corpus, split)
        starts = tokens.document_starts(0, len(tokens))
        assert len(starts) == n_lines
        assert all(shards.encoder.decode([token]).endswith("\n") for token in tokens[:][starts[1:] - 1])


def test_text_that_is_cut_is_prepared_in_whole(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text("".join(f"{name} {number:03}\n" for number in range(60)))
    units = find_units("folder", str(folder))
    whole = "".join(text for unit in units for text in unit.documents())
    assert whole == (folder / "a.txt").read_text() + (folder / "b.txt").read_text()
    train = [unit for unit in units if unit.split == "train"]
    assert [unit.number for unit in train] == list(range(4))
    assert {Path(unit.path).name for unit in train} == {"a.txt", "b.txt"}


def test_only_the_most_frequent_words_are_kept(corpus, tmp_path):
    index = prepare(Preparation("folder", str(corpus), tmp_path / "out", vocab_size=9))
    encoder = ShardCorpus(tmp_path / "out").encoder
    every = Vocabulary.from_text([text_of(corpus)]).words
    assert index["vocab_size"] == 9
    assert set(encoder.words) == {"<eos>", "<unk>", *[word for word in every if word[0] == "w"][:7]}


def test_a_killed_preparation_makes_only_what_is_missing(corpus, tmp_path, monkeypatch):
    out, write, written = tmp_path / "out", preparing._write_shard, []

    def die_after_three(work):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(work[-1])
        write(work)

    monkeypatch.setattr(preparing, "_write_shard", die_after_three)
    with pytest.raises(KeyboardInterrupt):
        prepare(Preparation("folder", str(corpus), out))
    (out / ".train-00004.npy.0123456789abcdef.tmp").write_bytes(b"half")
    monkeypatch.setattr(preparing, "_write_shard", lambda work: (written.append(work[-1]), write(work)))
    prepare(Preparation("folder", str(corpus), out))
    assert len(written) == len(set(written)) == len(find_units("folder", str(corpus)))
    assert [path.name for path in out.glob(".*")] == [".lock"]
    whole = prepare(Preparation("folder", str(corpus), tmp_path / "whole"))
    assert json.loads((out / "manifest.json").read_text())["splits"] == whole["splits"]


@pytest.mark.parametrize("vocabulary", ["words", "bytes"])
def test_a_changed_training_text_is_not_read_with_the_vocabulary_of_the_old_one(corpus, tmp_path, vocabulary):
    out = tmp_path / "out"
    what = Preparation("folder", str(corpus), out, vocabulary=vocabulary)
    prepare(what)
    (corpus / "train.txt").write_text("new words and\nmore\n" * 20)
    if vocabulary == "bytes":  # which no text changes
        prepare(what)
    else:
        with pytest.raises(ValueError, match=r"^the corpus is .*corpus, whose training text has changed; expected"):
            prepare(what)
        own = out / "tokenizer.json"
        prepare(Preparation("folder", str(corpus), out, vocabulary=vocabulary, tokenizer=own))
    shards = ShardCorpus(out)
    decoded = shards.encoder.decode(shards.tokens("train")[:])
    assert decoded.count("\n") == 40
    assert (decoded == text_of(corpus)) == (vocabulary != "words")


def test_pieces_of_another_size_are_made_again_with_the_same_vocabulary(corpus, tmp_path, monkeypatch):
    what = Preparation("folder", str(corpus), tmp_path / "out")
    index = prepare(what)
    monkeypatch.setattr("recurra.data._documents._PIECE_BYTES", 500)
    again = prepare(what)
    assert again["fingerprint"] == index["fingerprint"]
    assert len(again["splits"]["train"]) < len(index["splits"]["train"])
    shards = ShardCorpus(tmp_path / "out")
    assert shards.encoder.decode(shards.tokens("train")[:]) == text_of(corpus)


def test_a_text_that_is_cut_elsewhere_is_another_training_text(tmp_path):
    (folder := tmp_path / "books").mkdir()
    (folder / "a.txt").write_text("a line\n" * 100)
    what = Preparation("folder", str(folder), tmp_path / "out")
    prepare(what)
    (folder / "b.txt").write_text("b\n")  # which goes to the test text, and moves the end of the training text
    with pytest.raises(ValueError, match="whose training text has changed"):
        prepare(what)


def test_another_size_than_that_of_the_tokenizer_there_is_refused(corpus, tmp_path):
    def prepared(size):
        return prepare(Preparation("folder", str(corpus), tmp_path / "out", vocab_size=size))

    index = prepared(9)
    assert prepared(9) == index
    for other in (8, 10, None):
        said = other or "not given"
        with pytest.raises(ValueError, match=rf"^--vocab-size is {said}; expected that of .* of the 9 asked for"):
            prepared(other)


def test_shards_of_another_kind_of_vocabulary_are_refused(corpus, tmp_path):
    """A run keeps their tokenizer, and reads it by what its settings say: it could never be resumed."""
    out = tmp_path / "out"
    prepare(Preparation("folder", str(corpus), out, vocabulary="bpe", vocab_size=300))
    assert TextConfig(str(out), source="shards", vocabulary="bpe").build().vocab_size > 256
    with pytest.raises(ValueError, match=r"vocabulary is words; expected bpe, as the shards in .*out have"):
        TextConfig(str(out), source="shards").build()


def test_another_tokenizer_than_the_one_there_is_refused(corpus, tmp_path):
    prepare(Preparation("folder", str(corpus), tmp_path / "out"))
    prepare(Preparation("folder", str(corpus), tmp_path / "few", vocab_size=9))
    own = tmp_path / "out" / "tokenizer.json"
    prepare(Preparation("folder", str(corpus), tmp_path / "out", tokenizer=own))
    other = tmp_path / "few" / "tokenizer.json"
    with pytest.raises(ValueError, match=r"^--tokenizer is .*, another vocabulary; expected that in "):
        prepare(Preparation("folder", str(corpus), tmp_path / "out", tokenizer=other))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"vocab_size": 2}, "vocab_size is 2; expected"),
        ({"tokenizer": Path("a.json"), "vocab_size": 77}, "vocab_size is 77; expected None for bytes, or"),
        ({"name": "en"}, "name is 'en'; expected None unless the source is hf"),
        ({"field": "body"}, "field is 'body'; expected text, for files without columns"),
    ],
)
def test_what_a_preparation_would_ignore_is_refused(tmp_path, given, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Preparation("folder", str(tmp_path), tmp_path / "out", **given)


def test_two_preparations_of_one_corpus_take_turns(corpus, tmp_path):
    """What the first one writes is no leftover of a killed process for the second."""
    out = tmp_path / "out"
    out.mkdir()
    half, said = out / ".train-00000.npy.0123456789abcdef.tmp", []
    half.write_bytes(b"half")
    with ThreadPoolExecutor(1) as pool:
        with locked(out / ".lock"):
            other = pool.submit(lambda: prepare(Preparation("folder", str(corpus), out), report=said.append))
            while not said:
                time.sleep(0.01)
            assert half.exists()
        assert other.result(60)["vocab_size"] > 10
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    assert said[0] == f"{holder} prepares this corpus: waiting until it has ended"
    assert not half.exists()


def test_a_corpus_dated_in_the_future_is_prepared_once(corpus, tmp_path):
    os.utime(corpus / "train.txt", (2**33, 2**33))
    what, said = Preparation("folder", str(corpus), tmp_path / "out"), []
    index = prepare(what)
    assert prepare(what, report=said.append) == index
    assert len(said) == 1
    os.utime(corpus / "train.txt", (0, 0))
    with pytest.raises(ValueError, match="whose training text has changed"):
        prepare(what)


def test_a_finished_cache_is_read_without_writing(tmp_path):
    """It may be shared by many users, or read-only."""
    pytest.importorskip("datasets", reason="needs the extra data: pip install recurra[data]")
    (corpus := tmp_path / "corpus").mkdir()
    (corpus / "train.jsonl").write_text('{"text": "a b"}\n{"text": "b c"}\n')
    cache = tmp_path / "cache"
    config = TextConfig(str(corpus), source="jsonl", cache=str(cache), segment_length=4)
    folder = config.build().cache_folder
    (folder / ".lock").unlink()
    folder.chmod(0o555)
    before = sorted(folder.iterdir())
    data = config.build()
    assert data.decode(data.tokens("train")[:]) == "a b\nb c\n"
    assert sorted(folder.iterdir()) == before


def test_a_file_is_of_one_split():
    places = {
        "train/validated-0.jsonl": "train",
        "test_sets/train-0.jsonl": "test",
        "validation-0.jsonl": "valid",
        "data/train-0.jsonl": "train",
        "other.jsonl": None,
    }
    assert {file: documents._split_of(Path(file)) for file in places} == places


def test_damaged_and_missing_places_of_documents_are_found(corpus, tmp_path):
    out = tmp_path / "out"
    what = Preparation("folder", str(corpus), out)
    prepare(what)
    tokens = ShardCorpus(out).tokens("train")
    starts, file = tokens.document_starts(0, len(tokens)), tokens.shards[1].path.with_suffix(".documents.npy")
    content = file.read_bytes()
    file.write_bytes(content[:-8] + bytes([content[-8] ^ 3]) + content[-7:])
    with pytest.raises(ValueError, match=r"1.documents.npy is damaged; expected the file that its digest was made of"):
        tokens.document_starts(0, len(tokens))
    file.unlink()
    prepare(what)
    tokens = ShardCorpus(out).tokens("train")
    assert np.array_equal(tokens.document_starts(0, len(tokens)), starts)


def test_a_shard_that_is_replaced_while_it_is_read_is_noticed(corpus, tmp_path):
    """A training may run for days beside a preparation of the same folder; the sizes need not differ."""
    prepare(Preparation("folder", str(corpus), tmp_path / "out"))
    file = tmp_path / "out" / "train-00000.npy"
    tokens = ShardCorpus(tmp_path / "out").tokens("train")
    whole, content = tokens[:], bytearray(file.read_bytes())

    def replaced_by(content):
        other = file.with_name("other")
        other.write_bytes(content)
        other.replace(file)

    content[-1] ^= 1
    replaced_by(content)
    with pytest.raises(ValueError, match=r"train-00000.npy is damaged; expected"):
        tokens[:]
    content[-1] ^= 1
    replaced_by(content)
    tokens[:]
    date = file.stat().st_mtime_ns
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(file, ns=(date, date))  # the clock was set back
    with pytest.raises(ValueError, match=r"train-00000.npy is damaged; expected"):
        tokens[:]
    replaced_by(content)  # another file with the same tokens is as good
    assert np.array_equal(tokens[:], whole)
    file.write_bytes(content[:-2])
    with pytest.raises(ValueError, match=r"train-00000.npy is missing or cut short; expected"):
        ShardCorpus(tmp_path / "out")


@pytest.mark.parametrize(("source", "suffix"), [("parquet", "parquet"), ("jsonl", "jsonl")])
def test_columns_of_files(tmp_path, source, suffix):
    datasets = pytest.importorskip("datasets", reason="needs the extra data: pip install recurra[data]")
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = [f"w{i} w{i % 3}\nw{i % 5}" for i in range(10)]
    for number, part in enumerate((texts[:6], texts[6:])):
        data = datasets.Dataset.from_dict({"body": part})
        write = data.to_parquet if source == "parquet" else data.to_json
        write(str(folder / f"train-{number}.{suffix}"))
    datasets.Dataset.from_dict({"body": texts[:2]}).to_parquet(str(folder / "validation-0.parquet"))
    config = TextConfig(str(folder), source=source, text_field="body", cache=str(tmp_path / "cache"), segment_length=4)
    data = config.build()
    tokens = data.tokens("train")
    assert data.decode(tokens[:]) == "".join(f"{text}\n" for text in texts)
    assert len(tokens.document_starts(0, len(tokens))) == 10
    assert len(tokens.shards) == 2
    wrong = TextConfig(str(folder), source=source, text_field="text", cache=str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"a corpus without 'text'; expected rows with a text .* there is body"):
        wrong.build()


ROWS = "".join(f'{{"text": "w{i} a b"}}\n' for i in range(200)).encode()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.jsonl.gz", gzip.compress(ROWS)[:-200], r"\(Compressed file ended .*\); expected whole files of jsonl$"),
        ("train.jsonl", ROWS + b'{"text": "x', r"train.jsonl is not readable \(JSON parse error.*expected whole data"),
        (
            "train.jsonl",
            ROWS + b'{"text": null}\n',
            r"train.jsonl is without a text in row 201; expected a text in each",
        ),
        ("train.parquet", b"PAR1 nothing", r"corpus, which cannot be opened \(.*\); expected whole files of parquet$"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content, message):
    pytest.importorskip("datasets", reason="needs the extra data: pip install recurra[data]")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prepare(Preparation(name.split(".")[1], str(tmp_path / "corpus"), tmp_path / "out"))


@pytest.fixture
def shards(corpus, tmp_path):
    prepare(Preparation("folder", str(corpus), tmp_path / "out"))
    return tmp_path / "out"


def config_of(shards, **more):
    return TextConfig(str(shards), source="shards", **{"batch_size": 4, "segment_length": 5, **more})


def test_each_epoch_has_its_order_of_shards_and_any_part_of_it_can_be_read(shards):
    tokens = ShardCorpus(shards).tokens("train")
    first, second = (tokens.shuffled(3, epoch) for epoch in (0, 1))
    assert sorted(first.shards, key=str) == sorted(tokens.shards, key=str)
    assert [s.path for s in first.shards] != [s.path for s in second.shards]
    assert [s.path for s in first.shards] == [s.path for s in ShardedTokens(tokens.shards).shuffled(3, 0).shards]
    whole = np.concatenate([shard.read(0, shard.n_tokens) for shard in first.shards])
    for start, end in ((0, len(whole)), (70, 171), (12, 12), (len(whole) - 3, len(whole) + 9)):
        assert np.array_equal(first[start:end], whole[start:end])


@pytest.mark.parametrize("sampling", ["streams", "windows", "packed"])
def test_the_batches_of_ranks_are_those_of_one(shards, sampling):
    whole = config_of(shards, sampling=sampling).build().source("train")
    parts = [config_of(shards, sampling=sampling).build(rank=r, world_size=2).source("train") for r in range(2)]
    assert len(whole) == len(parts[0])
    for epoch, step in ((0, 0), (1, 2)):
        one, several = whole.batch(epoch, step), [part.batch(epoch, step) for part in parts]
        dim = 1 if sampling == "packed" else 0
        for name in ("inputs", "targets"):
            together = np.concatenate([getattr(batch, name) for batch in several], dim)
            assert np.array_equal(together, getattr(one, name))


def test_streams_of_shards_follow_the_text_of_their_epoch(shards):
    source = config_of(shards, seed=2).build().source("train")
    tokens = ShardCorpus(shards).tokens("train").shuffled(2, 1)
    rows = np.concatenate([source.batch(1, step).inputs for step in range(len(source))], 1)
    length = rows.shape[1]
    for number in range(4):
        start = number * (len(tokens) - 1) // 4
        assert np.array_equal(rows[number], tokens[start : start + length])


def test_packed_documents_are_whole_up_to_the_ends_of_rows(shards):
    source = config_of(shards, sampling="packed").build().source("train")
    text = ShardCorpus(shards).tokens("train").shuffled(0, 0)
    eos = ShardCorpus(shards).encoder.eos
    for step in range(len(source)):
        batch = source.batch(0, step)
        inputs, targets = batch.inputs[0].numpy(), batch.targets[0].numpy()
        assert np.array_equal(inputs, text[20 * step : 20 * step + 20])
        following = text[20 * step + 1 : 20 * step + 21].astype(np.int64)
        assert np.array_equal(targets, np.where(inputs == eos, IGNORED_TARGET, following))
        borders = {0, 5, 10, 15, 20, *(np.flatnonzero(inputs == eos) + 1).tolist()}
        assert batch.cu_seqlens.tolist() == sorted(borders)


def test_packed_documents_are_scored_apart(shards):
    """As they are trained: no state goes from one to the next."""
    source = config_of(shards, sampling="packed").build().source("train")
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(len(ShardCorpus(shards).encoder), None, 1, 8, 8)).double().eval()
    model.requires_grad_(False)
    losses = []
    for step in range(len(source)):
        batch = source.batch(0, step)
        for first, last in pairwise(batch.cu_seqlens.tolist()):
            logits, _ = model(batch.inputs[:, first:last])
            targets = batch.targets[0, first:last]
            losses += [functional.cross_entropy(logits[0], targets, ignore_index=IGNORED_TARGET, reduction="none")]
    n_targets = sum(int((source.batch(0, step).targets != IGNORED_TARGET).sum()) for step in range(len(source)))
    expected = float(torch.cat(losses).sum()) / n_targets
    assert evaluate(model, source).loss == pytest.approx(expected, rel=1e-12)
    assert evaluate(model, source, observe=lambda batch, predictions: None).loss == pytest.approx(expected, rel=1e-12)


def test_mixtures_draw_by_weight(corpus, shards, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for split in SPLITS:
        (other / f"{split}.txt").write_text("w3 w3 w3 w3 w3 w3 w3 w3 w3\n" * 4)
    prepare(Preparation("folder", str(other), tmp_path / "second", tokenizer=shards / "tokenizer.json"))
    mixture = {str(shards): 3.0, str(tmp_path / "second"): 1.0}
    source = config_of(shards, sampling="windows", mixture=mixture, batch_size=400).build().source("train")
    inputs = source.batch(0, 0).inputs
    number = ShardCorpus(shards).encoder.encode("w3")[0]
    eos = ShardCorpus(shards).encoder.eos
    share = ((inputs == number) | (inputs == eos)).all(1).float().mean()
    assert 0.15 < share < 0.35  # 0.25, give or take 0.02
    prepare(Preparation("folder", str(other), tmp_path / "third"))
    alien = config_of(shards, sampling="windows", mixture={str(tmp_path / "third"): 1.0}).build()
    with pytest.raises(ValueError, match="whose vocabulary is another one"):
        alien.source("train")


@pytest.fixture
def forked(monkeypatch):
    """Workers that are ready at once, and see what a test has replaced."""
    monkeypatch.setattr("recurra.data._prepare.get_context", lambda method: multiprocessing.get_context("fork"))
    monkeypatch.setattr(multiprocessing.context.ForkContext, "set_forkserver_preload", lambda self, names: None)


def test_real_processes_write_the_same(corpus, tmp_path, forked):
    one = prepare(Preparation("folder", str(corpus), tmp_path / "one"))
    assert prepare(Preparation("folder", str(corpus), tmp_path / "two", workers=2)) == one


def test_a_worker_that_is_killed_ends_the_preparation(corpus, tmp_path, forked, monkeypatch):
    """Which the system does where there is too little memory."""
    what = Preparation("folder", str(corpus), tmp_path / "out", workers=2)
    with monkeypatch.context() as patched:
        patched.setattr(preparing, "_batches", lambda unit: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(OSError, match=r"^a worker is killed, .*: run the same command again"):
            prepare(what)
    assert prepare(what)["splits"]["train"]


def test_shards_within_the_corpus_are_no_part_of_it(tmp_path):
    """The entries of shards are JSON files that begin with the name of a split, as JSON lines do."""
    pytest.importorskip("datasets", reason="needs the extra data: pip install recurra[data]")
    (tmp_path / "train.jsonl").write_bytes(ROWS)
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints/train-checkpoint.jsonl").write_bytes(ROWS)
    (tmp_path / "others").mkdir()
    (tmp_path / "others/vocabulary.json").write_text('{"vocab_size": 3}')
    (tmp_path / "others/train-1.json").write_bytes(ROWS)
    work = Preparation("jsonl", str(tmp_path), tmp_path / "train-shards")
    index = prepare(work)
    assert len(index["splits"]["train"]) == 2
    said = []
    assert prepare(work, report=said.append) == index
    assert said[-1].startswith("2 shards, 2 finished; ")


def test_shards_in_the_place_of_the_corpus_are_refused(tmp_path):
    work = Preparation("jsonl", str(tmp_path), tmp_path / "x" / "..")
    with pytest.raises(ValueError, match=r"--out is .*, the folder of the corpus; expected a folder of its own"):
        prepare(work)
    assert not [*tmp_path.iterdir()]


def test_a_file_that_becomes_shorter_is_refused(corpus):
    unit = next(unit for unit in find_units("folder", str(corpus)) if unit.first > 0)
    (corpus / "train.txt").write_text("w1\n")
    with pytest.raises(OSError, match=r"train.txt is shorter than when it was listed; expected a file that nothing"):
        list(unit.documents())
