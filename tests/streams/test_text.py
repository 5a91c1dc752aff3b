import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from recurra.data.tokenizers import BytePairEncoding
from recurra.streams.continuation import GeneratedText, GenerationConfig, TextPieces


def pieces_of(tokenizer, tokens, before=()):
    pieces = TextPieces(tokenizer, before)
    return [*(pieces.add(token) for token in tokens), pieces.flush()]


@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=60))
def test_a_text_comes_back_letter_by_whole_letter(bpe, text):
    tokens = bpe.encode(text).tolist()
    pieces = pieces_of(bpe, tokens)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.fixture(scope="module")
def half_a_letter(bpe):
    return [token for token in range(len(bpe)) if "\ufffd" in bpe.decode([token])]


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_tokens_come_out_as_they_decode(bpe, half_a_letter, data):
    """Half letters, and bytes that are no letter at all, included."""
    assert len(half_a_letter) > 50
    token = st.one_of(st.integers(0, len(bpe) - 1), st.sampled_from(half_a_letter))
    tokens = data.draw(st.lists(token, max_size=60))
    assert "".join(pieces_of(bpe, tokens)) == bpe.decode(tokens)


def test_half_a_letter_waits_for_the_rest():
    # no merges: a token for each byte
    plain = BytePairEncoding.train(["a"], 256)
    one, two, three, four = plain.encode("🙂").tolist()
    pieces = TextPieces(plain)
    assert [pieces.add(token) for token in (one, two, three)] == ["", "", ""]
    assert pieces.flush() == "\ufffd"
    assert pieces.add(four) == "🙂"
    assert pieces.flush() == ""


def test_garbage_without_end_is_passed_on_and_not_kept():
    plain = BytePairEncoding.train(["a"], 256)
    (first, *_) = plain.encode("é").tolist()
    pieces = TextPieces(plain)
    given_out = "".join(pieces.add(first) for _ in range(1000))
    assert set(given_out) == {"\ufffd"}
    assert len(given_out) >= 990
    assert len(pieces._window) <= 50


def test_words_have_a_blank_between_and_none_around_line_feeds(words):
    tokens = words.encode("a cat\n\nthe dog\n").tolist()
    assert pieces_of(words, tokens) == ["a", " cat", "\n", "\n", "the", " dog", "\n", ""]


def test_the_tokens_before_decide_on_the_first_blank(words):
    (cat,) = words.encode("cat").tolist()
    assert TextPieces(words, words.encode("the").tolist()).add(cat) == " cat"
    assert TextPieces(words, words.encode("the dog\n").tolist()).add(cat) == "cat"


def with_bytes_and(words):
    """A tokenizer with a token for each byte, as Llama's: it decodes a run of bytes as a whole."""
    vocabulary = {f"<0x{number:02X}>": number for number in range(256)} | {"<unk>": 256}
    vocabulary |= {f"▁{word}": 257 + place for place, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return BytePairEncoding(tokenizer), list(range(257, 257 + len(words)))


@pytest.mark.parametrize("n_before", range(1, 10))
def test_tokens_before_that_end_inside_a_letter_take_back_no_text(n_before):
    fallback, (a, *words) = with_bytes_and(["a", *map(str, range(60))])
    tokens = [a, *"日本語".encode(), *words]
    n_letters = (n_before - 1) // 3
    pieces = pieces_of(fallback, tokens[n_before:], before=tokens[:n_before])
    assert "".join(pieces) == "日本語"[n_letters:] + "".join(f" {n}" for n in range(60))
    assert "\ufffd" not in "".join(pieces)
    assert "" not in pieces[9 - n_before + 1 : -1], "no word waits"


def test_a_byte_that_is_no_letter_holds_nothing_back():
    fallback, (a, *words) = with_bytes_and(["a", *map(str, range(60))])
    *pieces, rest = pieces_of(fallback, [a, *"日".encode(), 0xE6, *words])
    assert pieces[:5] == [" a", "", "", "日", ""]
    assert pieces[5].endswith(" 0")
    assert pieces[6:] == [f" {n}" for n in range(1, 60)]
    assert rest == ""


# --- texts to stop at ---


class Pieces(list):
    """A tokenizer whose tokens are the numbers of these texts."""

    def decode(self, tokens):
        return "".join(self[token] for token in tokens)


def run_to_stop(stops, pieces):
    text, out = GeneratedText(Pieces(pieces), (), stops), []
    for token in range(len(pieces)):
        out.append(text.add(token))
        if text.is_over:
            return "".join(out), True
    return "".join([*out, text.flush()]), False


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_the_text_ends_at_the_first_stop(pieces, stops):
    out, found = run_to_stop(stops, pieces)
    # where the pieces come to an end matters: a stop that ends later in the same piece may begin earlier
    so_far = ""
    for piece in pieces:
        so_far += piece
        places = [so_far.find(stop) for stop in stops if stop in so_far]
        if places:
            assert (out, found) == (so_far[: min(places)], True)
            return
    assert (out, found) == (so_far, False)


def test_what_cannot_be_a_stop_is_not_held_back():
    pieces = Pieces(["hello", "\n", "world", "\n", "Q", "q"])
    text = GeneratedText(pieces, (), ["\nQ:"])
    assert [text.add(token) for token in range(6)] == ["hello", "", "\nworld", "", "", "\nQq"]


def test_a_stop_that_is_no_list_is_refused():
    """Its letters would be the stops."""
    with pytest.raises(ValueError, match="stop is 'END'; expected texts in a list"):
        GenerationConfig(stop="END")


@pytest.mark.parametrize("text", ["日本", "\n日", "\n🙂é", "日本語のテキスト" * 9, "a\n日a本" * 20])
def test_runs_of_bytes_come_back_letter_by_letter(text):
    """A decoder that falls back to bytes reads a run of them as undecided while its last letter is not complete."""
    vocabulary = {f"<0x{number:02X}>": number for number in range(256)} | {"<unk>": 256, "a": 257}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    encoding, ids = BytePairEncoding(tokenizer), tokenizer.encode(text).ids
    pieces = pieces_of(encoding, ids)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece and len(piece) <= 1 for piece in pieces)
    for letter in range(1, len(text)):  # the tokens before may end in the middle of a run, too
        n_before = len(tokenizer.encode(text[:letter]).ids)
        assert "".join(pieces_of(encoding, ids[n_before:], before=ids[:n_before])) == text[letter:]
