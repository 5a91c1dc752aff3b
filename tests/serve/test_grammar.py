"""Structured output: every text of a random model fulfils its schema or pattern, in any company."""

import json
import re
import sys

import pytest
import torch
from tests.starting_tokenizers import with_start

from recurra.data.tokenizers import ByteEncoder, BytePairEncoding, Vocabulary
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.serve._grammar import compile_grammar
from recurra.serve._http import ApiError, ServeSettings
from recurra.serve._model import ServedModel
from recurra.serve._requests import Request, TokenDetails
from recurra.serve._service import Service
from recurra.streams.stream import Stream

from .conftest import Rounds, Running, asking

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "name": {"type": "string", "maxLength": 4},
    },
    "required": ["kind", "ages", "name"],
    "additionalProperties": False,
}
"""Of at most 900 letters, white space included."""
DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


def fulfils_schema(text: str) -> bool:
    found = json.loads(text)
    assert set(found) == set(SCHEMA["properties"])
    ages_fit = len(found["ages"]) <= 3 and all(type(age) is int and 0 <= age <= 99 for age in found["ages"])
    return found["kind"] in ("cat", "dog") and ages_fit and len(found["name"]) <= 4


def served(name: str, tokenizer, vocabulary: int) -> ServedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LanguageModel(LanguageModelConfig(vocabulary, None, 1, 8, 8)).eval().double()
    return ServedModel(name, model, tokenizer, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def bytes_model() -> ServedModel:
    return served("bytes", ByteEncoder(), 256)


@pytest.fixture(scope="module")
def pairs() -> BytePairEncoding:
    """With a special token in front of a text."""
    text = ['{"kind": "cat", "ages": [12, 34], "name": "né"} 2026-11-27\n'] * 3
    return with_start(BytePairEncoding.train(text, 300))


def turn(model: ServedModel, grammar=None, n_tokens: int = 900, n: int = 1, seed: int = 0, **settings) -> Request:
    constraint = None if grammar is None else compile_grammar(model, "response_format", grammar)
    configs = [asking(n_tokens, seed + choice) for choice in range(n)]
    return Request(model, model.start, [1, 2], configs, constraint=constraint, **settings)


def text_of(rounds: Rounds, turn: Request, choice: int = 0) -> str:
    events = [event for event in rounds.events[turn] if event.choice == choice]
    return "".join(event.text for event in events if not getattr(event, "was_read", False))


# --- the texts ---


@pytest.mark.parametrize("tokenizer", ["bytes", "pairs"])
def test_texts_fulfil_their_grammars_side_by_side(bytes_model, pairs, tokenizer):
    model = bytes_model if tokenizer == "bytes" else served("pairs", pairs, len(pairs))
    rounds, cut = Rounds(), turn(model, "[0-9]+", n_tokens=15)
    schema, date, free = turn(model, SCHEMA, n=3), turn(model, DATE, n=2, seed=5), turn(model, n_tokens=40)
    rounds.run(schema, date, free, cut)
    texts = [text_of(rounds, schema, choice) for choice in range(3)]
    assert all(map(fulfils_schema, texts))
    assert len(set(texts)) == 3
    assert all(re.fullmatch(DATE, text_of(rounds, date, choice)) for choice in range(2))
    assert {end.reason for one in (schema, date) for end in rounds.ends(one)} == {"stop"}
    stream = Stream(model.plain)
    stream.feed([1, 2])
    assert rounds.written(free) == list(stream.generate(40))
    assert (len(rounds.written(cut)), rounds.ends(cut)[0].reason) == (15, "length")
    assert re.fullmatch("[0-9]{15,}", text_of(rounds, cut))


def test_logprobs_are_those_of_the_tokens_that_are_allowed(bytes_model):
    rounds = Rounds()
    one = turn(bytes_model, "[ab][bc]", details=TokenDetails(True, 3), reports_prompt=False)
    rounds.run(one)
    tokens = rounds.tokens(one)
    for place, (event, allowed) in enumerate(zip(tokens, (b"ab", b"bc"), strict=True)):
        before = [1, 2, *(earlier.id for earlier in tokens[:place])]
        logits = bytes_model.plain(torch.tensor([before]))[0][0, -1][list(allowed)]
        expected = dict(zip(allowed, logits.float().log_softmax(-1).tolist()))
        assert event.logprob == pytest.approx(expected[event.id], abs=1e-5)
        assert {other.id: other.logprob for other in event.alternatives[:2]} == pytest.approx(expected, abs=1e-5)


def test_no_special_token_is_part_of_a_text(pairs):
    """Nor a token of the model that its tokenizer lacks."""
    model = served("larger", pairs, len(pairs) + 13)
    allowed = compile_grammar(model, "structured_outputs", "(?s:.*)").allowed
    assert not allowed[[*pairs.start, *range(len(pairs), model.vocabulary)]].any()
    assert allowed.sum() > 200


def test_tokens_of_letters_are_spelled_too(exact):
    """Without a digit 7 in its vocabulary, the text is over after its first letter."""
    rounds, one = Rounds(), turn(exact, "[a-c](7.*)?")
    rounds.run(one)
    assert (text_of(rounds, one) in "abc", rounds.ends(one)[0].reason) == (True, "stop")


# --- what cannot be used ---


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("(a", "unclosed group"),
        ("(?=a)b", "look-ahead and look-behind, is not supported"),
        ("a{0}", "no text of this model's tokens, but for the empty one"),
        ({"type": "word"}, "Invalid type: word"),
        ({"type": "string", "not": {"const": "a"}}, 'Unimplemented keys: ["not"]'),
        ({"$ref": "file:///etc/passwd"}, "is not present in a registry"),
    ],
)
def test_grammars_that_cannot_be_compiled(bytes_model, grammar, reason):
    with pytest.raises(ApiError) as refused:
        compile_grammar(bytes_model, "response_format", grammar)
    assert (refused.value.status, refused.value.param) == (400, "response_format")
    assert refused.value.message.startswith("response_format is a grammar that cannot be used (")
    assert reason in refused.value.message
    assert "\n" not in refused.value.message


def test_models_that_cannot_spell_a_text(exact):
    words = Vocabulary.from_text(["a cat and a dog\n"])
    for tokenizer, reason in ((None, "which has no tokenizer"), (words, "whose tokens are words")):
        with pytest.raises(ApiError, match=reason):
            compile_grammar(served("words", tokenizer, 7), "response_format", DATE)
    with pytest.raises(ApiError, match="no text of this model's tokens"):
        compile_grammar(exact, "response_format", "[6-9]+")  # which its letters lack


def test_a_text_that_cannot_go_on_ends_alone(exact, bytes_model):
    """The letters have no brace, which shows when one is needed; the other pattern would take 15 s."""
    rounds, good = Rounds(), turn(exact, n_tokens=9)
    bad = turn(exact, SCHEMA), turn(bytes_model, "(a{1000}){1000}", n_tokens=9)
    rounds.run(*bad, good)
    assert [rounds.ends(one)[0].reason for one in (*bad, good)] == ["error", "error", "length"]


def test_a_server_without_the_library_says_how_to_install_it(bytes_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ApiError, match=r'pip install "recurra\[serve\]"') as refused:
        compile_grammar(bytes_model, "response_format", DATE)
    assert refused.value.status == 501


# --- over HTTP ---


@pytest.fixture(scope="module")
def server(bytes_model):
    with Running(Service([bytes_model, served("numbers", None, 9)], ServeSettings(), threads=1)) as running:
        yield running


ASKED = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
CHAT = {"model": "bytes", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 900, "seed": 4}


def test_openais_client_gets_what_it_asks_for(server):
    api = server.openai_client("none")
    answer = api.chat.completions.create(**CHAT, response_format=ASKED, n=2)
    texts = [choice.message.content for choice in answer.choices]
    assert all(map(fulfils_schema, texts))
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    chunks = list(api.chat.completions.create(**CHAT, response_format=ASKED, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == texts[0]
    assert chunks[-1].choices[0].finish_reason == "stop"
    cut = api.chat.completions.create(**CHAT | {"max_tokens": 8}, response_format={"type": "json_object"})
    assert (cut.choices[0].message.content[0], cut.choices[0].finish_reason) == ("{", "length")


def test_patterns_in_completions_and_sessions(server):
    form = {"structured_outputs": {"regex": DATE}}
    answer = server.openai_client("none").completions.create(
        model="bytes", prompt="on ", max_tokens=50, extra_body=form
    )
    assert re.fullmatch(DATE, answer.choices[0].text)
    client = server.client()
    client.post("/v1/sessions", json={"model": "bytes", "name": "one"})
    body = {"text": "on ", "max_tokens": 50, "stream": False, **form}
    told = client.post("/v1/sessions/one/generate", json=body).json()
    assert re.fullmatch(DATE, "".join(token["text"] for token in told["tokens"][3:]))
    assert told["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"response_format": {"type": "json_schema"}}, "json_schema is missing"),
        ({"response_format": ASKED | {"type": "text"}}, "json_schema is given"),
        ({"response_format": ASKED, "structured_outputs": {"regex": "a"}}, "are both given"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(a"}}, "unclosed group"),
        ({"model": "numbers", "prompt": [1], "structured_outputs": {"regex": "a"}}, "which has no tokenizer"),
    ],
)
def test_requests_that_cannot_be_met(server, body, reason):
    answer = server.client().post("/v1/completions", json={"model": "bytes", "prompt": "a", "max_tokens": 5, **body})
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]
