import json
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from recurra.data.tokenizers import EOS, UNK, ByteEncoder, BytePairEncoding, Vocabulary, library_errors
from recurra.streams.continuation import TextEncoder

BLOCKS = ["low lower lowest\nnew newer newest\n", "wide wider widest\n" * 5]


@pytest.fixture(scope="module")
def encoding():
    return BytePairEncoding.train(BLOCKS, 300)


@cache
def trained(*blocks, size):
    return BytePairEncoding.train(blocks, size)


@cache
def with_a_merge_of_line_feeds(feed):
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), feed + feed]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, [(feed, feed)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return letters, tokenizer, BytePairEncoding.from_json(BytePairEncoding(tokenizer).to_json(), "a file")


def word_level(unknown):
    tokenizer = Tokenizer(models.WordLevel({"low": 0, "<unk>": 7, "<s>": 8}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def test_training_merges_what_is_frequent(encoding):
    assert 256 < len(encoding) <= 300
    assert len(encoding.encode("wider")) < 4
    assert isinstance(encoding, TextEncoder)


@given(st.text(st.characters(codec="utf-8")))
def test_any_text_comes_back(text):
    encoding = trained(size=256)
    tokens = encoding.encode(text)
    assert encoding.decode(tokens) == text
    assert len(tokens) == len(text.encode())
    assert len(encoding) == 256


SPACES = st.lists(st.sampled_from(["\n", "\n\n", " ", "  ", "\t", "\r\n", "wide", " new", "x:", "é", "日"])).map(
    "".join
)


@given(SPACES)
def test_lines_are_encoded_apart(text):
    encoding = trained(*BLOCKS, *["wide  \n  new\n"] * 9, size=300)
    assert encoding.encodes_lines_apart
    lines = [token for line in text.splitlines(keepends=True) for token in encoding.encode(line).tolist()]
    assert encoding.encode(text).tolist() == lines
    library = Tokenizer.from_str(encoding.to_json())
    assert library.encode(text, add_special_tokens=False).ids == lines


@given(SPACES)
def test_tokens_of_others_may_span_lines(text):
    """A merge of two line feeds ("\u010a" in the byte alphabet), as GPT-2 has one."""
    feed = "\u010a"
    letters, tokenizer, encoding = with_a_merge_of_line_feeds(feed)
    assert not encoding.encodes_lines_apart
    assert encoding.encode(text).tolist() == tokenizer.encode(text).ids
    tokens = encoding.encode("a\n\n\nb").tolist()
    assert [letters[i] for i in tokens] == ["a", feed + feed, feed, "b"]
    assert encoding.decode(tokens) == "a\n\n\nb"
    assert encoding.encode("").tolist() == []


@pytest.mark.parametrize("change", ["normalizer", "added token", "words"])
def test_lines_that_may_depend_on_each_other_are_encoded_together(encoding, change):
    tokenizer = Tokenizer.from_str(encoding.to_json())
    if change == "normalizer":
        tokenizer.normalizer = normalizers.Prepend("x")
    elif change == "added token":
        tokenizer.add_tokens([AddedToken("wide", rstrip=True)])
    else:
        lines = pre_tokenizers.Split(Regex(r"[^\n]*\n|[^\n]+"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False), lines])
    changed = BytePairEncoding(tokenizer)
    assert not changed.encodes_lines_apart
    text = "low\nwide\n  new\n\nlow"
    assert changed.encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def test_nothing_is_cut_padded_or_added():
    tokenizer = word_level("<unk>")
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 8)])
    encoding = BytePairEncoding(tokenizer)
    assert encoding.encode("low low bird low").tolist() == [0, 0, 7, 0]
    assert len(encoding) == 9, "one more than the largest number, though three are used"
    assert tokenizer.truncation is not None, "the caller's tokenizer is left alone"


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
        with pytest.raises(ValueError, match=r"tokenizer.json is (JSON whose|not readable as|not UTF-8).*; expected "):
            BytePairEncoding.load(path)
    with pytest.raises(ValueError, match=r"vocab_size is 255; expected at least 256"):
        BytePairEncoding.train(BLOCKS, 255)


def test_a_damaged_tokenizer_is_refused_by_its_digest(tmp_path):
    path = tmp_path / "tokenizer.json"
    BytePairEncoding.train(["the cat and the dog\n"] * 20, 300).save(path)
    content = json.loads(path.read_text())
    swapped = dict(zip(content["model"]["vocab"], reversed(content["model"]["vocab"].values()), strict=True))
    for change in ({"vocab": swapped}, {"merges": content["model"]["merges"][:-1]}, {"sha256": "0" * 64}):
        path.write_text(json.dumps({**content, "model": content["model"] | change}))
        with pytest.raises(ValueError, match=r"tokenizer.json is damaged: its content does not have its digest"):
            BytePairEncoding.load(path)


@pytest.mark.parametrize("number", [2**31 - 1, -1, 1.0, None, True])
def test_numbers_that_tokens_cannot_have_are_refused_before_the_library_sees_them(tmp_path, number):
    content = json.loads(Tokenizer(models.BPE({"a": 0}, [])).to_str())
    added = {"content": "b", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    in_vocabulary = content | {"model": content["model"] | {"vocab": {"a": 0, "b": number}}}
    among_added = content | {"added_tokens": [added | {"id": number, "special": True}]}
    for changed in (in_vocabulary, among_added):
        (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"tokenizer.json is a tokenizer with a token of the number .*; expected"):
            BytePairEncoding.load(tmp_path / "tokenizer.json")


def test_a_panic_of_the_library_is_a_refusal():
    class Panic(BaseException):
        pass

    with pytest.raises(ValueError, match=r"^in two lines$"), library_errors():
        raise Panic("in\ntwo lines")
    with pytest.raises(KeyboardInterrupt), library_errors():
        raise KeyboardInterrupt


TEXTS = ["low lower\n", "", "né", "widest low\nnew", "\n\n"]


@pytest.mark.parametrize(
    "encoder",
    [trained(*BLOCKS, size=300), ByteEncoder(), Vocabulary([*["low", "new", "né"], EOS, UNK])],
    ids=["bpe", "bytes", "words"],
)
def test_many_texts_are_encoded_as_each_alone(encoder):
    tokens, lengths = encoder.encode_each(TEXTS)
    assert [piece.tolist() for piece in np.split(tokens, np.cumsum(lengths)[:-1])] == [
        encoder.encode(text).tolist() for text in TEXTS
    ]
    assert [len(part) for part in encoder.encode_each([])] == [0, 0]


def test_a_long_document_is_encoded_line_by_line(monkeypatch):
    """In one piece, it takes several times the memory, and one core."""
    encoder, seen = trained(*BLOCKS, size=300), []

    class Spy:
        def __init__(self, tokenizer):
            self.encode_batch_fast = lambda texts, **more: (
                seen.extend(texts) or tokenizer.encode_batch_fast(texts, **more)
            )

    monkeypatch.setattr(encoder, "_tokenizer", Spy(encoder._tokenizer))
    assert len(encoder.encode_each(["low\nnew\n", "wide"])[1]) == 2
    assert seen == ["low\n", "new\n", "wide"]


def test_bytes_are_byte_pairs_without_pairs():
    pairs = ByteEncoder().as_byte_pairs()
    assert len(pairs) == 256
    for text in (*BLOCKS, "na\u00efve \u65e5\u672c\r\n\n\x00\t  \U0001f600 don't", "".join(map(chr, range(300)))):
        assert pairs.encode(text).tolist() == list(text.encode())
    every = list(range(256))
    assert pairs.decode(every) == ByteEncoder().decode(every)
    assert pairs.encodes_lines_apart
