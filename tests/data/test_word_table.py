"""Words of long texts, numbered by a kernel, are those that str.split finds."""

import json
import sys
from collections import Counter
from random import Random

import numpy as np
import pytest

from recurra.data import Vocabulary, word_kernels, word_table
from recurra.data import vocabulary as vocabularies
from recurra.data.vocabulary import LONG
from recurra.data.word_counts import count_words, merged_counts
from recurra.data.word_table import WordTable

SPACES = [chr(i) for i in range(sys.maxunicode + 1) if chr(i).isspace()]
LETTERS = "ab\x00\x1b\x7f\x80\x84\x86éß\u167f\u1681\u1fff\u200b\u2027\u2030\u205e\u2060\u2fff\u3001\ud800\U0001f600"


def text_of(seed, n_words):
    draw = Random(seed)
    words = ["".join(draw.choices(LETTERS, k=draw.randint(1, 12))) for _ in range(n_words // 3 + 1)]
    return "".join(draw.choice(words) + "".join(draw.choices(SPACES, k=draw.randint(1, 3))) for _ in range(n_words))


def numbered(text):
    words = list(dict.fromkeys(text.split()))
    places = {word: number for number, word in enumerate(words)}
    return words, [places[word] for word in text.split()]


@pytest.mark.parametrize("text", ["", " ", "a", " a\n", *(text_of(seed, 2000) for seed in range(3)), *SPACES, *LETTERS])
def test_words_are_those_of_str_split(text):
    text = f"x{text}y {text}" if len(text) == 1 else text
    words, numbers = numbered(text)
    table = WordTable()
    assert table.add(text).tolist() == numbers
    assert table.words == words
    assert len(table) == len(words)


def test_the_table_grows_while_it_reads():
    parts = [" ".join(f"{n * n:x}" for n in range(start, start + 40_000)) for start in range(0, 120_000, 20_000)]
    table = WordTable(["5", "0"])
    words, numbers = numbered("5 0 " + " ".join(parts))
    assert np.concatenate([table.add(part) for part in parts]).tolist() == numbers[2:]
    assert table.words == words


def test_words_of_one_hash_are_told_apart(monkeypatch):
    split = word_kernels._split

    def of_one_hash(text, start, begins, ends, keys):
        n, end = split(text, start, begins, ends, keys)
        keys[:n] = 2**33
        return n, end

    monkeypatch.setattr(word_kernels, "_split", of_one_hash)
    monkeypatch.setattr(word_table, "number_words", word_kernels.number_words.py_func)
    table = WordTable()
    assert table.add("cattle cat cattle a cats cat at").tolist() == [0, 1, 0, 2, 3, 1, 4]
    assert table.find("ca cattle catt at", 9).tolist() == [9, 0, 9, 4]


def test_what_the_table_lacks_is_unknown():
    table = WordTable(["cat", "a", "cattle"])
    assert table.find("a ca cat catt cattle cattles", 7).tolist() == [1, 7, 0, 7, 2, 7]
    assert len(table) == 3


@pytest.fixture(params=["kernel", "strings"])
def way(request, monkeypatch):
    if request.param == "strings":
        monkeypatch.setattr(vocabularies, "NUMBA_IS_MISSING", "it is not there")


def test_counts_are_those_of_strings(way):
    blocks = [text_of(seed, 30_000) + "\n" for seed in range(4)] + ["short <eos>\n"]
    assert sum(map(len, blocks[:2])) > LONG
    expected = Counter("".join(blocks).replace("\n", " <eos> ").split())
    assert list(count_words(blocks).items()) == list(expected.items())
    parts = []
    for block in blocks:
        counts = Counter(block.split())
        parts.append((" ".join(counts), np.array(list(counts.values()))))
    assert list(merged_counts(parts).items()) == list(Counter("".join(blocks).split()).items())


def test_long_texts_are_encoded_as_short_ones(way):
    line = "the cat <unk> sat \u2003 on the mat née\n"
    text = line * (LONG // len(line) + 1)
    vocabulary = Vocabulary(["mat", "the", "<unk>", "<eos>", "née", "cat"])
    assert len(text) > LONG
    assert len(vocabulary.encode(line)) == 9
    tokens = vocabulary.encode(text)
    assert tokens.dtype == np.int64
    assert np.array_equal(tokens, np.tile(vocabulary.encode(line), len(text) // len(line)))


def test_a_saved_vocabulary_is_that_of_the_json_module():
    vocabulary = Vocabulary(['"', "\\", "née", "\x7f", "<eos>", "\u2028x".strip(), "<unk>", "\U0001f600"])
    content = {"format": "recurra vocabulary 1", "fingerprint": vocabulary.fingerprint, "words": vocabulary.words}
    assert vocabulary.to_json() == json.dumps(content, ensure_ascii=False, indent=0)
