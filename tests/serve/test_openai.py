"""OpenAI's endpoints, asked by OpenAI's own client."""

import asyncio
import json
import time

import openai
import pytest
import torch

from recurra.serve._bodies import CompletionBody
from recurra.serve._chat_bodies import ChatBody
from recurra.serve._http import ApiError
from recurra.serve._model import ServedModel
from recurra.serve._openai import _Chat, _Completion
from recurra.serve._requests import EndEvent, Request, TokenEvent
from recurra.serve._tools import AnswerForm
from recurra.streams.sampling import SamplingConfig
from recurra.streams.stream import Stream

from .conftest import Letters, asking, language_model

CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture
def api(server) -> openai.OpenAI:
    return server.openai_client("none")


def expected(models, prompt: str, n: int, seed: int = 0, temperature: float = 1.0) -> str:
    stream = Stream(models[0].plain)
    stream.feed(Letters().encode(prompt))
    return Letters().decode(stream.generate(n, sampling=SamplingConfig(temperature=temperature), seed=seed))


def test_the_models_are_listed(api, models):
    assert [model.id for model in api.models.list()] == ["letters", "numbers", "classes"]
    assert api.models.retrieve("numbers").recurra["vocabulary"] == 40
    with pytest.raises(openai.NotFoundError, match="model is 'none'; expected one of letters"):
        api.models.retrieve("none")


def test_completions_with_n_and_seed_are_the_streams_of_these_seeds(api, models):
    answer = api.completions.create(model="letters", prompt="some text", max_tokens=12, n=3, seed=5)
    texts = [choice.text for choice in answer.choices]
    assert texts == [expected(models, "some text", 12, seed) for seed in (5, 6, 7)]
    assert len(set(texts)) == 3
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 3
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 36)


def test_more_texts_than_streams_are_refused(serving):
    client = serving(max_streams=2).client()
    body = {"model": "letters", "prompt": "a", "max_tokens": 2}
    assert client.post("/v1/completions", json=body | {"n": 2}).status_code == 200
    refused = client.post("/v1/completions", json=body | {"n": 3})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "hello", "max_tokens": 0, "n": 3, "logprobs": 0, "echo": True}),  # 15 with 1
        ("chat/completions", {"messages": CHAT, "max_tokens": 2, "n": 3, "logprobs": True, "top_logprobs": 2}),
    ],
)
def test_an_answer_in_one_has_a_limit_for_all_its_texts(client, monkeypatch, path, body):
    most = 15 if body.get("echo") else 18
    body = {"model": "letters", **body}
    monkeypatch.setattr("recurra.serve._bodies._MOST_NUMBERS", most)
    assert client.post(f"/v1/{path}", json=body).status_code == 200
    monkeypatch.setattr("recurra.serve._bodies._MOST_NUMBERS", most - 1)
    refused = client.post(f"/v1/{path}", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
    assert f"expected {most - 1} in all: stream the answer" in refused.json()["error"]["message"]
    assert client.post(f"/v1/{path}", json=body | {"stream": True}).status_code == 200


def test_a_stream_gives_the_same_text(api, models):
    options = {"include_usage": True}
    chunks = list(
        api.completions.create(
            model="letters", prompt="ab", max_tokens=9, n=2, seed=1, stream=True, stream_options=options
        )
    )
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [expected(models, "ab", 9, seed) for seed in (1, 2)]
    assert sorted(c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason) == ["length"] * 2
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 18)


def test_stop_ends_before_the_text(api, models):
    whole = expected(models, "ab", 30)
    stop = whole[12:14]
    answer = api.completions.create(model="letters", prompt="ab", max_tokens=30, seed=0, stop=["never", stop])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (whole[: whole.index(stop)], "stop")
    chunks = api.completions.create(model="letters", prompt="ab", max_tokens=30, seed=0, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]


@pytest.mark.parametrize("n_stop", [1, 2, 3])
def test_logprobs_end_where_the_text_ends(client, models, n_stop):
    whole = expected(models, "ab", 30)
    stop = whole[12 : 12 + n_stop]
    body = {"model": "letters", "prompt": "ab", "max_tokens": 30, "seed": 0, "stop": [stop, "never"], "logprobs": 1}
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    text = whole[: whole.index(stop)]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    assert choice["logprobs"]["tokens"] == list(text)
    assert choice["logprobs"]["text_offset"] == list(range(len(text)))
    chat = {"model": "letters", "messages": CHAT, "max_tokens": 30, "seed": 0, "logprobs": True}
    content = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
    stop = content[12 : 12 + n_stop]
    (choice,) = client.post("/v1/chat/completions", json=chat | {"stop": stop}).json()["choices"]
    assert [token["token"] for token in choice["logprobs"]["content"]] == list(content[: content.index(stop)])


def test_logprobs_and_echo(api, models):
    (choice,) = api.completions.create(
        model="letters", prompt="abc", max_tokens=4, temperature=0, logprobs=2, echo=True
    ).choices
    text = "abc" + expected(models, "abc", 4, temperature=0.0)
    assert choice.text == text
    told = choice.logprobs
    assert told.tokens == list(text)
    assert told.text_offset == list(range(7))
    ids = torch.from_numpy(Letters().encode(text))
    logprobs = models[0].plain(ids[None])[0][0].log_softmax(-1)
    right = [logprobs[place - 1, ids[place]].item() for place in range(1, 7)]
    assert told.token_logprobs[0] is None
    assert told.token_logprobs[1:] == pytest.approx(right, abs=1e-4)
    assert told.top_logprobs[0] is None
    assert all(len(top) == 2 and max(top, key=top.get) == token for top, token in zip(told.top_logprobs[3:], text[3:]))


def test_prompts_of_tokens_and_models_without_a_tokenizer(api, models):
    stream = Stream(models[1].plain)
    stream.feed([3, 4])
    numbers = list(stream.generate(5, sampling=SamplingConfig(temperature=0.0)))
    answer = api.completions.create(model="numbers", prompt=[3, 4], max_tokens=5, temperature=0)
    assert answer.choices[0].text == "".join(map(str, numbers))
    with pytest.raises(openai.BadRequestError, match="no tokenizer"):
        api.completions.create(model="numbers", prompt="text")
    with pytest.raises(openai.BadRequestError, match="predicts classes"):
        api.completions.create(model="classes", prompt=[1])


COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


@pytest.mark.parametrize(
    "prompts", [["some text", "", "ab"], [[3, 4], [5], [6, 7, 8]], ["ab"]], ids=["texts", "lists of tokens", "one"]
)
@pytest.mark.parametrize(
    "options",
    [
        {"n": 2},
        {"max_tokens": 0, "echo": True, "logprobs": 2},
        {"echo": True, "logprobs": 1, "n": 2, "stop": ["a", "b"]},
    ],
    ids=str,
)
def test_each_of_several_prompts_is_answered_as_it_would_be_alone(serving, exact, prompts, options):
    client = serving(models=[exact]).client()
    body = {"model": "exact", "max_tokens": 6, "seed": 4, **options}
    alone = [client.post("/v1/completions", json=body | {"prompt": prompt}).json() for prompt in prompts]
    answer = client.post("/v1/completions", json=body | {"prompt": prompts}).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    expected = [choice for one in alone for choice in one["choices"]]
    assert [choice | {"index": 0} for choice in answer["choices"]] == [choice | {"index": 0} for choice in expected]
    usage = {name: sum(one["usage"][name] for one in alone) for name in COUNTS}
    assert {name: answer["usage"][name] for name in COUNTS} == usage

    options = {"stream": True, "stream_options": {"include_usage": True}}
    lines = client.post("/v1/completions", json=body | {"prompt": prompts} | options).text.split("\r\n\r\n")
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert (last["choices"], {name: last["usage"][name] for name in COUNTS}) == ([], usage)
    assert all(chunk["usage"] is None for chunk in chunks)
    streamed = [choice for chunk in chunks for choice in chunk["choices"]]
    for choice in answer["choices"]:
        parts = [part for part in streamed if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        if choice["logprobs"]:
            for name, values in choice["logprobs"].items():
                assert [value for part in parts for value in part["logprobs"][name]] == values


def test_several_prompts_have_the_limits_of_one(serving, monkeypatch):
    client = serving(max_streams=4, max_tokens=20, max_queue=0).client()
    body = {"model": "letters", "max_tokens": 2}

    def refusal(**options):
        answer = client.post("/v1/completions", json=body | options)
        return answer.status_code if answer.status_code == 200 else answer.json()["error"]["param"]

    assert refusal(prompt=["a", "b"], n=2) == 200
    assert refusal(prompt=["a", "b"], n=3) == "prompt"
    assert refusal(prompt=["a" * 10, "b" * 10]) == 200
    assert refusal(prompt=["a" * 10, "b" * 11]) == "prompt"
    assert refusal(prompt=[[1], [40]]) == "prompt"
    monkeypatch.setattr("recurra.serve._bodies._MOST_NUMBERS", 8)
    assert refusal(prompt=["a", "b"], n=2) == 200
    assert refusal(prompt=["a", "b"], n=2, max_tokens=3) == "stream"


def test_prompts_for_which_there_is_no_place_end_the_others(serving):
    running = serving(max_streams=2, max_queue=0)
    client = running.client()
    long = {"model": "letters", "prompt": "a", "max_tokens": 60_000, "stream": True}
    with client.stream("POST", "/v1/completions", json=long) as answer:
        lines = answer.iter_lines()
        next(lines)
        refused = client.post("/v1/completions", json={"model": "letters", "prompt": ["a", "b"], "max_tokens": 60_000})
        assert refused.json()["error"]["code"] == "queue_full"
        engine = running.service.engine
        for _ in range(1000):  # the engine drops the first prompt in its next round
            with engine._lock:
                if engine.scheduler.n_streams + engine.scheduler.n_waiting == 1:
                    break
            time.sleep(0.01)
        assert client.post("/v1/completions", json={"model": "letters", "prompt": "a"}).status_code == 200


def test_a_chat_goes_through_the_template(api, models):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    prompt = "system: be brief\nuser: hello\nassistant: "
    answer = api.chat.completions.create(
        model="letters", messages=messages, max_completion_tokens=8, seed=2, logprobs=True, top_logprobs=3
    )
    text = expected(models, prompt, 8, 2)
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", text)
    assert answer.usage.prompt_tokens == len(prompt)
    told = answer.choices[0].logprobs.content
    assert [token.token for token in told] == list(text)
    assert all(len(token.top_logprobs) == 3 and token.bytes == list(token.token.encode()) for token in told)
    held = api.chat.completions.create(  # every token is told of, also where its text waits for a stop to be decided
        model="letters", messages=messages, max_tokens=8, seed=2, logprobs=True, stop=[text[2:5] + text[2:5] * 9]
    )
    assert [token.token for token in held.choices[0].logprobs.content] == list(text)
    chunks = list(api.chat.completions.create(model="letters", messages=messages, max_tokens=8, seed=2, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_model_without_a_template_refuses_chats(api):
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        api.chat.completions.create(model="numbers", messages=[{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": 65}, "n"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"40": 1}}, "logit_bias"),  # beyond the vocabulary
        ({"max_tokens": -1}, "max_tokens"),
        ({"extra_body": {"best_of": 3}}, "best_of"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
    ],
)
def test_what_has_no_meaning_here_is_refused(api, options, param):
    with pytest.raises(openai.BadRequestError) as refused:
        api.completions.create(**{"model": "letters", "prompt": "a", **options})
    assert refused.value.param.split(".")[0] == param
    assert refused.value.type == "invalid_request_error"


PENALTIES = {"presence_penalty": 1.2, "frequency_penalty": 0.4}


def test_penalties_and_bias_are_those_of_a_stream(api, models):
    answer = api.completions.create(
        model="letters", prompt="ab", max_tokens=30, seed=2, n=2, logit_bias={"3": 1.5, "4": -100}, **PENALTIES
    )
    config = SamplingConfig(logit_bias={3: 1.5, 4: -100.0}, **PENALTIES)
    for seed, choice in enumerate(answer.choices, 2):
        stream = Stream(models[0].plain)
        stream.feed(Letters().encode("ab"))
        assert choice.text == Letters().decode(stream.generate(30, sampling=config, seed=seed))


@pytest.mark.parametrize("off", [{"top_k": 0}, {"top_k": -1}, {"min_p": 0}, {"response_format": {"type": "text"}}])
def test_other_servers_values_for_off_are_off(api, models, off):
    answer = api.completions.create(model="letters", prompt="ab", max_tokens=9, seed=1, extra_body=off)
    assert answer.choices[0].text == expected(models, "ab", 9, 1)


CHAT_OF_TWO = [{"role": "user", "content": "is 1<2 & 'x'?"}, {"role": "assistant", "content": "yes"}]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0] | tojson }}", """{"role": "user", "content": "is 1<2 & 'x'?"}"""),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "user"),
        ("{% for m in messages %}{% generation %}{{ m.role }},{% endgeneration %}{% endfor %}", "user,assistant,"),
        ("{{ bos_token + strftime_now('%%') }}", "%"),
        ("{{ tools is none and documents is none }}", "True"),
    ],
)
def test_templates_are_transformers_templates(template, text):
    served = ServedModel("letters", language_model(), Letters(), chat_template=template)
    assert served.chat_text(CHAT_OF_TWO) == text


def test_a_template_with_a_token_that_nobody_knows_is_refused():
    for template in ("{{ eos_token }}", "{{ messages[0].content + eos_token }}", "{{ eos_token ~ 1 }}"):
        served = ServedModel("letters", language_model(), Letters(), chat_template=template)
        with pytest.raises(ApiError, match="uses eos_token, which a run does not name"):
            served.chat_text(CHAT_OF_TWO)


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"])
def test_a_template_that_fails_refuses_the_messages(template):
    served = ServedModel("letters", language_model(), Letters(), chat_template=template)
    with pytest.raises(ApiError, match="the chat template refuses these messages"):
        served.chat_text(CHAT_OF_TWO)


def writes(answer, rounds) -> list[list[str]]:
    """The data of each message, by the write that it goes out in."""

    async def events():
        for some in rounds:
            yield some

    async def collect() -> list[bytes]:
        return [written async for written in answer.stream(events())]

    return [
        [line.removeprefix("data: ") for line in written.decode().split("\r\n\r\n") if line]
        for written in asyncio.run(collect())
    ]


def pieces_of(messages: list[str]) -> list[tuple[int, str]]:
    choices = [json.loads(message)["choices"][0] for message in messages]
    return [(one["index"], one.get("text") or one.get("delta", {}).get("content")) for one in choices]


@pytest.fixture(params=["completion", "chat"])
def answer(request, models):
    served = models[0]
    request_ = Request(served, served.start, [1], [asking(5), asking(5)])
    if request.param == "completion":
        return _Completion([request_], CompletionBody(model="letters", prompt="a", n=2))
    return _Chat([request_], ChatBody(model="letters", messages=[{"role": "user", "content": "a"}], n=2), AnswerForm())


def test_what_came_at_once_goes_out_at_once(answer, models):
    start = models[0].start
    rounds = [
        [TokenEvent(0, 3, "d"), TokenEvent(1, 4, "e")],
        [TokenEvent(0, 5, ""), TokenEvent(1, 6, "g\r\n\n")],
        [EndEvent(0, "length", start, "f"), EndEvent(1, "stop", start)],
    ]
    *told, done = writes(answer, rounds)
    assert done == ["[DONE]"]
    told = told[-3:]  # a chat begins with who speaks
    assert pieces_of(told[0]) == [(0, "d"), (1, "e")]
    assert pieces_of(told[1]) == [(1, "g\r\n\n")]
    assert [json.loads(message)["choices"][0]["finish_reason"] for message in told[2]] == ["length", "stop"]


def test_an_error_comes_after_what_was_written_before_it_and_ends_the_answer(answer, models):
    start = models[0].start
    rounds = [[TokenEvent(0, 3, "d"), EndEvent(1, "error", start), TokenEvent(0, 4, "e")], [TokenEvent(0, 5, "f")]]
    *_, told, failed = writes(answer, rounds)
    assert pieces_of(told) == [(0, "d")]
    assert json.loads(failed[0])["error"]["code"] == "turn_failed"


@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
def test_an_answer_that_was_cut_short_does_not_look_like_its_end(answer, models, reason):
    start = models[0].start
    *told, _ = writes(answer, [[TokenEvent(0, 3, "d"), EndEvent(0, reason, start), EndEvent(1, "stop", start)]])
    reasons = [json.loads(message)["choices"][0]["finish_reason"] for message in told[-1]]
    assert reasons == [None, "length", "stop"]
