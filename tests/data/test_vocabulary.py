import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recurra.data.tokenizers import Vocabulary
from recurra.streams.continuation import TextEncoder

WORDS = ["the", "cat", "<eos>", "<unk>", "sat"]


def test_words_by_frequency_then_appearance():
    vocabulary = Vocabulary.from_text(["b c a a\nc d\n", "d e\n"])
    assert vocabulary.words == ("<eos>", "c", "a", "d", "b", "e", "<unk>")


def test_encoding_counts_every_line_and_knows_what_it_does_not_know():
    vocabulary = Vocabulary(WORDS)
    assert vocabulary.encode("the cat\n\n dog\tsat\r\n").tolist() == [0, 1, 2, 2, 3, 4, 2]
    assert vocabulary.encode("the cat").tolist() == [0, 1]
    assert vocabulary.encode("").tolist() == []
    assert (vocabulary.eos, vocabulary.unk, len(vocabulary)) == (2, 3, 5)


def test_decoding():
    vocabulary = Vocabulary(WORDS)
    assert vocabulary.decode([0, 1, 2, 2, 3, 4]) == "the cat\n\n<unk> sat"
    for token in (5, -1):
        with pytest.raises(ValueError, match=f"a token is {token}; expected 0 to 4"):
            vocabulary.decode([0, token])


@given(st.text(st.characters(codec="utf-8")))
def test_any_text_goes_in_and_its_words_come_out(text):
    vocabulary = Vocabulary.from_text([text])
    words = [line.split() for line in text.split("\n")]
    assert [line.split() for line in vocabulary.decode(vocabulary.encode(text)).split("\n")] == words


def test_saving_and_loading(tmp_path):
    vocabulary = Vocabulary.from_text(['ä "quoted" \\ 𝄞 \x7f\n'])
    vocabulary.save(tmp_path / "new" / "vocabulary.json")
    content = {"format": "recurra vocabulary 1", "fingerprint": vocabulary.fingerprint, "words": vocabulary.words}
    assert vocabulary.to_json() == json.dumps(content, ensure_ascii=False, indent=0)
    loaded = Vocabulary.load(tmp_path / "new" / "vocabulary.json")
    assert loaded.words == vocabulary.words
    assert loaded.fingerprint == vocabulary.fingerprint
    assert isinstance(loaded, TextEncoder)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "<unk>"], "words is a list without '<eos>'"),
        ([*WORDS, "cat"], "words is a list with 'cat' more than once; expected distinct words"),
        ([*WORDS, ""], "an entry of words is ''; expected a string"),
        ([*WORDS, 7], "an entry of words is 7; expected a string"),
    ],
)
def test_impossible_words_are_refused(words, message, unchecked):
    with pytest.raises(ValueError, match=message):
        Vocabulary(words)


def test_files_that_are_no_vocabulary_are_refused(tmp_path):
    path = tmp_path / "vocabulary.json"
    with pytest.raises(FileNotFoundError, match=r"vocabulary\.json"):
        Vocabulary.load(path)
    Vocabulary(WORDS).save(path)
    sound = json.loads(path.read_text())
    damaged = {
        "not readable as JSON": [path.read_bytes()[:-9]],
        "not UTF-8": [b"\xff\xfe"],
        "a list; expected a JSON object": [b"[]"],
        "not a vocabulary; expected a file written by": [
            b"{}",
            json.dumps({**sound, "format": "other"}).encode(),
        ],
        "damaged vocabulary": [
            json.dumps({**sound, "words": sound["words"][::-1]}).encode(),
            json.dumps({**sound, "words": 3}).encode(),
            json.dumps({**sound, "words": ["a"]}).encode(),
            json.dumps({"format": sound["format"]}).encode(),
            json.dumps({**sound, "words": [*WORDS, WORDS[0]]}).encode(),
            json.dumps({**sound, "words": [*WORDS, 3]}).encode(),
            json.dumps({**sound, "words": [*WORDS, ["a"]]}).encode(),
            json.dumps({**sound, "words": [*WORDS, "\ud800"]}).encode(),
        ],
    }
    for message, contents in damaged.items():
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(ValueError, match=rf"vocabulary\.json is .*{message}"):
                Vocabulary.load(path)
