import pytest
from tests.starting_tokenizers import with_start
from tokenizers import Tokenizer, processors

from recurra.data.tokenizers import BytePairEncoding, Vocabulary
from recurra.streams.continuation import encode_first, first_tokens, start_of

TEXT = "a cat and a dog\nthe dog\n" * 3
PLAIN = BytePairEncoding.train([TEXT], 280)
STARTING = with_start(PLAIN)


def test_a_published_tokenizer_says_what_stands_in_front_of_a_text():
    bos = STARTING._tokenizer.token_to_id("<bos>")
    assert STARTING.start == start_of(STARTING) == (bos,)
    assert STARTING.encode("a cat").tolist() == PLAIN.encode("a cat").tolist(), "not inside a stream"
    assert encode_first(STARTING, "a cat").tolist() == [bos, *PLAIN.encode("a cat").tolist()]
    assert encode_first(STARTING, "<bos>a cat").tolist() == encode_first(STARTING, "a cat").tolist(), "once"
    assert encode_first(STARTING, "").tolist() == []
    assert first_tokens(STARTING) == [bos]
    assert BytePairEncoding.from_json(STARTING.to_json(), "a file").start == (bos,)


@pytest.mark.parametrize("encoder", [PLAIN, Vocabulary.from_text([TEXT])], ids=["bpe", "words"])
def test_ours_have_nothing_in_front(encoder):
    assert start_of(encoder) == ()
    assert encode_first(encoder, TEXT).tolist() == encoder.encode(TEXT).tolist()
    assert first_tokens(encoder) == encoder.encode("\n").tolist()


def test_several_tokens_in_front_and_one_behind():
    tokenizer = Tokenizer.from_str(PLAIN.to_json())
    tokenizer.add_special_tokens(["<a>", "<b>", "<c>"])
    tokens = [(token, tokenizer.token_to_id(token)) for token in ("<a>", "<b>", "<c>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<a> <b> $A <c>", special_tokens=tokens)
    assert BytePairEncoding(tokenizer).start == (tokens[0][1], tokens[1][1])
