"""/tokenize and /detokenize, and names of models with slashes."""

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
