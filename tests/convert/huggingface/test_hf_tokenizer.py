import pytest
from benchmarks.faults.mutants import JSON, mutants
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.starting_tokenizers import with_start
from tokenizers import Tokenizer, pre_tokenizers, processors
from transformers import AutoTokenizer

from recurra.convert.huggingface.folder import fast_tokenizer, read_tokenizer, text_start
from recurra.data.tokenizers import BytePairEncoding, Vocabulary

TEXT = "a cat and a dog\nthe dog saw  a cat in the garden \nnaïve façade — 日本語 🙂 <unk>\n\n" * 4
ENCODERS = {"words": Vocabulary.from_text([TEXT]), "bpe": BytePairEncoding.train([TEXT], 290)}
PIECES = [
    *" abé日\n\t\x1c\x1f\x85\u00a0\u2028\u3000\u200b\ufeff",
    "<eos>",
    "<unk>",
    " cat",
    "the ",
    " \n",
    "  ",
    "'s",
    "<",
]


@pytest.fixture(scope="module", params=ENCODERS)
def pair(request, tmp_path_factory):
    """A run's tokenizer, and what transformers reads from the folder."""
    folder = tmp_path_factory.mktemp(request.param)
    encoder = ENCODERS[request.param]
    fast_tokenizer(encoder).save_pretrained(folder)
    return encoder, AutoTokenizer.from_pretrained(folder), folder


@settings(max_examples=150, deadline=None)
@given(text=st.lists(st.sampled_from(PIECES) | st.characters(exclude_categories=["Cs"]), max_size=20).map("".join))
def test_every_text_has_the_same_numbers_and_every_number_the_same_text(pair, text):
    encoder, fast, _ = pair
    tokens = encoder.encode(text).tolist()
    assert fast(text)["input_ids"] == tokens
    assert fast.decode(tokens) == encoder.decode(tokens)


def test_the_way_back(pair):
    encoder, _, folder = pair
    assert read_tokenizer(folder).fingerprint == encoder.fingerprint
    assert read_tokenizer(folder.parent) is None


def test_the_tokens_in_front_of_a_text_go_along(tmp_path):
    encoder = with_start(ENCODERS["bpe"])
    fast = fast_tokenizer(encoder)
    assert fast("a cat")["input_ids"] == [*encoder.start, *encoder.encode("a cat").tolist()]
    assert text_start(encoder) == encoder.start[0]
    fast.save_pretrained(tmp_path)
    assert read_tokenizer(tmp_path).start == encoder.start


def test_what_would_stand_behind_a_text_does_not_go_along(tmp_path):
    """A run continues a text; after its end it would write something else."""
    tokenizer = Tokenizer.from_str(ENCODERS["bpe"].to_json())
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokens = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=tokens)
    encoder = BytePairEncoding(tokenizer)
    fast = fast_tokenizer(encoder)
    assert fast("a cat")["input_ids"] == [tokens[0][1], *encoder.encode("a cat").tolist()]
    fast.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("a cat")["input_ids"] == fast("a cat")["input_ids"]
    assert read_tokenizer(tmp_path).start == encoder.start


def test_a_tokenizer_that_transformers_reads_otherwise_is_refused(monkeypatch):
    class Doubling(BytePairEncoding):
        def encode(self, text):
            return super().encode(text + text)

    with pytest.raises(ValueError, match="cannot be taken over"):
        fast_tokenizer(Doubling.train([TEXT], 290))


def test_a_folder_of_another_tokenizer(tmp_path):
    tokenizer = Tokenizer.from_str(ENCODERS["bpe"].to_json())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = read_tokenizer(tmp_path)
    assert not found.encodes_lines_apart
    assert found.encode(TEXT).tolist() == tokenizer.encode(TEXT).ids


@pytest.mark.parametrize("name", ["words", "byte pairs"])
def test_damaged_tokenizers_are_refused_in_one_sentence_or_read(tmp_path, name):
    text = "the cat sat on a mat\nthe dog saw cats\n" * 3
    encoder = Vocabulary.from_text([text]) if name == "words" else BytePairEncoding.train([text], 270)
    fast_tokenizer(encoder).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    for mutant in mutants(JSON, path.read_bytes(), 36):
        path.write_bytes(mutant.data)
        try:
            read_tokenizer(tmp_path)
        except ValueError as error:
            message = str(error)
        else:
            continue
        assert str(path) in message, mutant.name
        assert "\n" not in message, mutant.name
