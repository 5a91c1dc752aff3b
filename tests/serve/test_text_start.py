"""Models whose tokenizer puts a token in front of a text: once, where a stream begins."""

import pytest
from tests.starting_tokenizers import with_start

from recurra.data.tokenizers import BytePairEncoding
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.serve._model import ServedModel

TOKENIZER = with_start(BytePairEncoding.train(["the dog saw a cat\n"] * 3, 260))
N = len(TOKENIZER.encode("a cat"))


@pytest.fixture
def client(serving):
    model = LanguageModel(LanguageModelConfig(len(TOKENIZER), None, 1, 8, 8)).eval()
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    running = serving(models=[ServedModel("starting", model, TOKENIZER, chat_template=template)])
    client = running.client()
    client.service = running.service
    return client


@pytest.mark.parametrize(
    ("prompt", "n_tokens"),
    [("a cat", N + 1), ("<bos>a cat", N + 1), ("", 1), (TOKENIZER.encode("a cat").tolist(), N)],
    ids=["text", "text that has it", "nothing", "tokens"],
)
def test_a_completion_begins_with_it(client, prompt, n_tokens):
    answer = client.post("/v1/completions", json={"model": "starting", "prompt": prompt, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == n_tokens


def test_a_session_begins_with_it_and_goes_on_without(client):
    client.post("/v1/sessions", json={"name": "mine"})
    for n_tokens in (N + 1, 2 * N + 1):
        client.post("/v1/sessions/mine/feed", json={"text": "a cat"})
        assert client.get("/v1/sessions/mine").json()["position"] == n_tokens
    tokens = client.get("/v1/sessions/mine/transcript").json()["tokens"]
    assert [token["id"] for token in tokens] == [*TOKENIZER.start, *TOKENIZER.encode("a cat").tolist() * 2]


def test_a_session_that_moves_on_while_a_text_is_encoded_refuses_it(client, monkeypatch):
    """Otherwise the text would be read in the middle of a stream as if it began one."""
    client.post("/v1/sessions", json={"name": "other"})
    served = client.service.models["starting"]

    def slow(text, *, is_first, encode=served.encode):
        if text == "a cat":
            assert client.post("/v1/sessions/other/feed", json={"text": "the dog"}).status_code == 200
        return encode(text, is_first=is_first)

    monkeypatch.setattr(served, "encode", slow)
    monkeypatch.setattr("recurra.serve._bodies._SHORT_TEXT", 0)
    answer = client.post("/v1/sessions/other/feed", json={"text": "a cat"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_busy")
