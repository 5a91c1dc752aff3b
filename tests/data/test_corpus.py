import os

import numpy as np
import pytest

from recurra.data._files import TextFile
from recurra.data.corpus import TextCorpus
from recurra.data.tokenizers import BytePairEncoding, Vocabulary


@pytest.fixture
def encoded_files(monkeypatch):
    """The names of the files that are read to be encoded or counted, in order."""
    names = []
    blocks = TextFile.blocks

    def counting(file):
        names.append(file.path.name)
        return blocks(file)

    monkeypatch.setattr(TextFile, "blocks", counting)
    return names


def text_of(loaded, split):
    return loaded.encoder.decode(loaded.tokens(split).tolist())


def test_words(make_corpus):
    loaded = TextCorpus.load(make_corpus())
    assert loaded.splits == ("train", "valid", "test")
    assert loaded.encoder.words == ("the", "<eos>", "sat", "cat", "on", "mat", "dog", "<unk>")
    assert text_of(loaded, "train") == "the cat sat on the mat\n\nthe dog sat\n"
    assert text_of(loaded, "valid") == "the <unk> sat\n"
    assert text_of(loaded, "test") == "<unk> dog on the mat\n"


@pytest.mark.usefixtures("no_type_checker")
def test_contradicting_arguments_are_refused(make_corpus):
    folder = make_corpus()
    own = Vocabulary(["<eos>", "<unk>"])
    for options in ({"vocabulary": "bpe"}, {"vocabulary": own, "bpe_vocab_size": 300}):
        with pytest.raises(ValueError, match=r"bpe_vocab_size is .* with vocabulary=.*; expected a size"):
            TextCorpus.load(folder, **options)
    with pytest.raises(ValueError, match="vocabulary is 'letters'; expected one of words, bpe"):
        TextCorpus.load(folder, vocabulary="letters")


def test_everything_is_encoded_once(make_corpus, encoded_files):
    folder = make_corpus()
    first = TextCorpus.load(folder)
    assert encoded_files == ["train.txt", "train.txt", "valid.txt", "test.txt"]
    again = TextCorpus.load(folder)
    assert len(encoded_files) == 4
    assert again.encoder.words == first.encoder.words
    for split in first.splits:
        assert np.array_equal(again.tokens(split), first.tokens(split))


def test_changed_data_is_encoded_anew(make_corpus, encoded_files):
    TextCorpus.load(make_corpus())
    encoded_files.clear()
    folder = make_corpus(valid="the bear sat\n")
    assert text_of(TextCorpus.load(folder), "valid") == "the <unk> sat\n"
    assert encoded_files == ["valid.txt"]
    path = folder / "valid.txt"
    stat = path.stat()
    path.write_text("the mat cat\n")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert text_of(TextCorpus.load(folder), "valid") == "the mat cat\n", "same size, same date"


def test_a_single_file_is_a_corpus_that_says_how_it_was_cut(tmp_path, make_corpus, encoded_files):
    path = tmp_path / "novel.txt"
    path.write_text("the cat sat\n" * 40)
    loaded = TextCorpus.load(path)
    assert loaded.note == "split novel.txt at line ends, in bytes: 432 to train, 24 to valid, 24 to test"
    assert text_of(loaded, "valid") == "the cat sat\n" * 2
    assert len(encoded_files) == 4
    TextCorpus.load(path)
    assert len(encoded_files) == 4
    path.write_text("the cat sat\n" * 39 + "the sat cat\n")
    assert text_of(TextCorpus.load(path), "test") == "the cat sat\nthe sat cat\n"
    assert TextCorpus.load(make_corpus()).note == ""


def test_bad_text_leaves_no_cache_of_it(make_corpus):
    folder = make_corpus(valid=b"the\n\xff\n")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"valid.txt is not UTF-8 \(byte 4 is 0xff"):
            TextCorpus.load(folder)
    folder = make_corpus(valid="the\n\n")
    assert TextCorpus.load(folder).tokens("valid").tolist() == [0, 1, 1]


def test_ptb_has_its_published_size(real_corpus, tmp_path):
    """929,589 / 73,760 / 82,430 tokens with one <eos> a line and 10,000 words, <unk> and <eos> among them."""
    loaded = TextCorpus.load(real_corpus("ptb"), cache=tmp_path)
    assert [len(loaded.tokens(split)) for split in loaded.splits] == [929_589, 73_760, 82_430]
    assert len(loaded.encoder) == 10_000
    assert int(loaded.tokens("train").max()) == 9_999
    assert loaded.encoder.decode(loaded.tokens("valid")[:14].tolist()) == (
        "consumers may want to move their telephones a little closer to the tv set"
    )
    valid = (real_corpus("ptb") / "ptb.valid.txt").read_text().replace("\n", "<eos>").split(" ")
    unknown = sum(word == "<unk>" for word in valid)
    assert (loaded.tokens("valid") == loaded.encoder.unk).sum() == unknown, "valid brings no word of its own"


def test_wikitext_has_its_published_size(real_corpus, tmp_path):
    """217,646 / 245,569 validation and test tokens: blank lines count, with an <eos> each."""
    folder = real_corpus("wikitext")
    files = {"valid": folder / "wiki.valid.tokens", "test": folder / "wiki.test.tokens"}
    own = Vocabulary.from_text([files["valid"].read_text(encoding="utf-8")])
    loaded = TextCorpus.load(folder, vocabulary=own, cache=tmp_path)
    assert {split: len(loaded.tokens(split)) for split in files} == {"valid": 217_646, "test": 245_569}
    assert (loaded.tokens("valid") == own.eos).sum() == 3_760


def test_real_text_comes_back_from_bpe(real_corpus, tmp_path):
    texts = {}
    for split in ("valid", "test"):
        text = (real_corpus("wikitext") / f"wiki.{split}.tokens").read_text(encoding="utf-8")
        texts[split] = text[: text.rindex("\n", 0, 300_000) + 1]
        (tmp_path / f"wiki.{split}.tokens").write_text(texts[split], encoding="utf-8")
    loaded = TextCorpus.load(tmp_path, vocabulary=BytePairEncoding.train([texts["valid"]], 2_000))
    assert {split: text_of(loaded, split) for split in texts} == texts
