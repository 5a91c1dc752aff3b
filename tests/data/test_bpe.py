import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from recurra.data import BytePairEncoding
from recurra.data.corpus import TextEncoder

BLOCKS = ["low lower lowest\nnew newer newest\n", "wide wider widest\n" * 5]


@pytest.fixture(scope="module")
def encoding():
    return BytePairEncoding.train(BLOCKS, 300)


def word_level(unknown):
    tokenizer = Tokenizer(models.WordLevel({"low": 0, "<unk>": 7, "<s>": 8}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def test_training_merges_what_is_frequent(encoding):
    assert 256 < len(encoding) <= 300
    assert len(encoding.encode("wider")) < 4
    assert isinstance(encoding, TextEncoder)


def test_training_is_repeatable(encoding):
    assert BytePairEncoding.train(BLOCKS, 300).fingerprint == encoding.fingerprint
    assert BytePairEncoding.train(BLOCKS, 260).fingerprint != encoding.fingerprint


@given(st.text(st.characters(codec="utf-8")))
def test_any_text_comes_back(text):
    encoding = BytePairEncoding.train([], 256)
    tokens = encoding.encode(text)
    assert encoding.decode(tokens) == text
    assert len(tokens) == len(text.encode())
    assert len(encoding) == 256


def test_lines_are_encoded_apart():
    """A merge of two line feeds ("\u010a" in the byte alphabet), as GPT-2 has one, is never reached."""
    feed = "\u010a"
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), feed + feed]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, [(feed, feed)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert [letters[i] for i in tokenizer.encode("a\n\n\nb").ids] == ["a", feed + feed, feed, "b"]
    encoding = BytePairEncoding(tokenizer)
    tokens = encoding.encode("a\n\n\nb").tolist()
    assert [letters[i] for i in tokens] == ["a", feed, feed, feed, "b"]
    assert encoding.decode(tokens) == "a\n\n\nb"
    assert encoding.encode("").tolist() == []


def test_saving_and_loading(tmp_path, encoding):
    path = tmp_path / "new" / "tokenizer.json"
    encoding.save(path)
    loaded = BytePairEncoding.load(path)
    assert loaded.fingerprint == encoding.fingerprint
    assert loaded.encode("lower widest\n").tolist() == encoding.encode("lower widest\n").tolist()


def test_nothing_is_cut_padded_or_added():
    tokenizer = word_level("<unk>")
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 8)])
    encoding = BytePairEncoding(tokenizer)
    assert encoding.encode("low low bird low").tolist() == [0, 0, 7, 0]
    assert len(encoding) == 9, "one more than the largest number, though three are used"
    assert tokenizer.truncation is not None, "the caller's tokenizer is left alone"


def test_decoding_refuses_other_numbers(encoding):
    for token in (len(encoding), -1):
        with pytest.raises(ValueError, match=f"a token is {token}; expected 0 to {len(encoding) - 1}"):
            encoding.decode([0, token])


def test_tokenizers_that_drop_letters_are_refused(tmp_path):
    dropping = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    with pytest.raises(ValueError, match="tokenizer is one that drops characters that it does not know; expected"):
        BytePairEncoding(dropping)
    with pytest.raises(ValueError, match="tokenizer is unable to encode characters"):
        BytePairEncoding(word_level("missing"))
    dropping.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer.json: tokenizer is one that drops"):
        BytePairEncoding.load(tmp_path / "tokenizer.json")


def test_bad_files_and_sizes_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json"):
        BytePairEncoding.load(path)
    for content in (b"{}", b"{", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"tokenizer.json is unreadable .*; expected a tokenizer.json"):
            BytePairEncoding.load(path)
    with pytest.raises(ValueError, match=r"vocab_size is 255; expected at least 256"):
        BytePairEncoding.train(BLOCKS, 255)
