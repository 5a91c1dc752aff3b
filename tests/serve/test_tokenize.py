"""Texts and tokens: /tokenize and /detokenize, the start of a text, and names of models with slashes."""

import pytest
from tests.starting_tokenizers import with_start

from recurra.data.tokenizers import BytePairEncoding
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.serve._model import ServedModel

from .conftest import Letters, language_model

TOKENIZER = with_start(BytePairEncoding.train(["the dog saw a cat\n"] * 3, 260))
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def running(serving):
    model = LanguageModel(LanguageModelConfig(len(TOKENIZER), None, 1, 8, 8)).eval()
    starting = ServedModel("starting", model, TOKENIZER, chat_template=TEMPLATE)
    return serving(models=[starting, ServedModel("org/letters", language_model(), Letters())], max_tokens=50)


def test_texts_become_tokens_as_completions_read_them_and_back(running):
    client = running.client()
    words = TOKENIZER.encode("a cat").tolist()
    for body, tokens in (
        ({"prompt": "a cat"}, [*TOKENIZER.start, *words]),
        ({"prompt": "a cat", "add_special_tokens": False}, words),
        ({"messages": [{"role": "user", "content": "a cat"}], "model": "starting"}, [*TOKENIZER.start, *words]),
        ({"prompt": "", "return_token_strs": False}, []),
        ({"prompt": "ab", "model": "org/letters"}, [0, 1]),
    ):
        assert client.post("/tokenize", json=body).json() == {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": 50,
        }
    assert client.post("/detokenize", json={"tokens": words}).json() == {"prompt": "a cat"}
    assert client.post("/detokenize", json={"tokens": [0, 1], "model": "org/letters"}).json() == {"prompt": "ab"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("detokenize", {"tokens": [300]}, "tokens"),
        ("tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
    ],
)
def test_what_cannot_be_tokenized_is_refused(running, path, body, param):
    refused = running.client().post(f"/{path}", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_model_s_name_may_have_slashes(running):
    client = running.client()
    for name in ("org/letters", "org%2Fletters"):
        assert client.get(f"/v1/models/{name}").json()["id"] == "org/letters"
    api = running.openai_client("none")
    assert api.models.retrieve("org/letters").id == "org/letters"
    assert api.completions.create(model="org/letters", prompt="a", max_tokens=1).model == "org/letters"
    assert client.get("/v1/models/org/other").json()["error"]["code"] == "model_not_found"


# --- a tokenizer that puts a token in front of a text: once, where a stream begins ---

N = len(TOKENIZER.encode("a cat"))


@pytest.mark.parametrize(
    ("prompt", "n_tokens"),
    [("a cat", N + 1), ("<bos>a cat", N + 1), ("", 1), (TOKENIZER.encode("a cat").tolist(), N)],
    ids=["text", "text that has it", "nothing", "tokens"],
)
def test_a_completion_begins_with_the_start_of_a_text(running, prompt, n_tokens):
    body = {"model": "starting", "prompt": prompt, "max_tokens": 1}
    usage = running.client().post("/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens"] == n_tokens


def test_a_session_begins_with_it_and_goes_on_without(running):
    client = running.client()
    client.post("/v1/sessions", json={"name": "mine"})
    for n_tokens in (N + 1, 2 * N + 1):
        client.post("/v1/sessions/mine/feed", json={"text": "a cat"})
        assert client.get("/v1/sessions/mine").json()["position"] == n_tokens
    tokens = client.get("/v1/sessions/mine/transcript").json()["tokens"]
    assert [token["id"] for token in tokens] == [*TOKENIZER.start, *TOKENIZER.encode("a cat").tolist() * 2]


def test_a_session_that_moves_on_while_a_text_is_encoded_refuses_it(running, monkeypatch):
    """Otherwise the text would be read in the middle of a stream as if it began one."""
    client = running.client()
    client.post("/v1/sessions", json={"name": "other"})
    served = running.service.models["starting"]

    def slow(text, *, is_first, encode=served.encode):
        if text == "a cat":
            assert client.post("/v1/sessions/other/feed", json={"text": "the dog"}).status_code == 200
        return encode(text, is_first=is_first)

    monkeypatch.setattr(served, "encode", slow)
    monkeypatch.setattr("recurra.serve._bodies._SHORT_TEXT", 0)
    answer = client.post("/v1/sessions/other/feed", json={"text": "a cat"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_busy")
