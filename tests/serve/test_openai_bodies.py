"""Request bodies of OpenAI's clients: what asks for nothing is accepted, what cannot be done is refused by name."""

import json
import re

import openai
import pytest

TEXT = {"model": "letters", "prompt": "ab", "max_tokens": 4, "seed": 3}
CHAT = {"model": "letters", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "seed": 3}
NULLS = ("temperature", "top_p", "n", "stream", "stream_options", "stop", "logprobs", "logit_bias", "user")
NULLS += ("presence_penalty", "frequency_penalty")

NEUTRAL_TEXTS = [
    dict.fromkeys(NULLS),
    *({name: None} for name in ("echo", "best_of", "suffix")),
    {"best_of": 1},
    {"best_of": 2, "n": 2},
    {"suffix": ""},
    {"logit_bias": {}},
    {"presence_penalty": 0, "frequency_penalty": 0.0},
    {"user": "someone"},
    {"stop": []},
    {"stop": ""},
    {"stop": [None, ""]},
    {"max_tokens": 4.0, "n": 1.0, "seed": 3.0},
    {"top_k": 0},
    {"top_k": -1},
    {"min_p": 0},
    {"top_p": 1},
    {"typical_p": 1.0},
    {"repetition_penalty": 1},
    {"repeat_penalty": 1.0, "length_penalty": 1.0},
    {"ignore_eos": False, "min_tokens": 0, "stop_token_ids": [], "use_beam_search": False},
    {"skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False},
    {"stream_options": {"include_usage": None, "continuous_usage_stats": False}},
    {"guided_json": None, "guided_regex": None},
]
NEUTRAL_CHATS = [
    *({name: None} for name in (*NULLS, "tools", "tool_choice", "response_format", "prediction", "audio", "store")),
    *({name: None} for name in ("max_completion_tokens", "top_logprobs", "functions", "modalities", "metadata")),
    {"response_format": {"type": "text"}},
    {"logit_bias": {}},
    {"store": True},
    {"metadata": {"key": "value"}},
    {"user": "someone"},
    {"service_tier": "auto"},
    {"parallel_tool_calls": True},
    {"prompt_cache_key": "key", "prompt_cache_retention": "24h"},
    {"safety_identifier": "someone"},
    {"reasoning_effort": "low"},
    {"verbosity": "low"},
    {"tool_choice": "none"},
    {"tool_choice": "auto", "tools": []},
    {"tool_choice": "none", "tools": [{"type": "function", "function": {"name": "f"}}]},
    {"function_call": "none", "functions": []},
    {"modalities": ["text"]},
    {"presence_penalty": 0, "frequency_penalty": 0},
    {"prediction": {"type": "content", "content": "hello"}},
    {"logprobs": False, "top_logprobs": 0},
    {"messages": [{"role": "user", "content": "hello", "name": "someone"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]},
    {"messages": [{"role": "user", "content": "hello", "tool_calls": None, "refusal": None, "annotations": []}]},
    {"max_completion_tokens": 4, "max_tokens": None},
    {"n": 1.0, "max_tokens": 4.0, "top_k": -1.0},
    {"add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": {}},
]


def answered(client, path: str, body: dict) -> list[str]:
    answer = client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return [choice.get("text") or choice["message"]["content"] for choice in answer.json()["choices"]]


@pytest.mark.parametrize("extra", NEUTRAL_TEXTS, ids=str)
def test_what_asks_for_nothing_changes_no_completion(client, extra):
    n = {"n": int(extra.get("n") or 1)}
    assert answered(client, "completions", TEXT | extra) == answered(client, "completions", TEXT | n)


@pytest.mark.parametrize("extra", NEUTRAL_CHATS, ids=str)
def test_what_asks_for_nothing_changes_no_chat(client, extra):
    assert answered(client, "chat/completions", CHAT | extra) == answered(client, "chat/completions", CHAT)


def test_a_seed_of_minus_one_is_drawn_and_others_are_taken(client):
    draws = [answered(client, "completions", TEXT | {"seed": seed, "max_tokens": 40}) for seed in (-1, -1, -5, -5)]
    assert draws[0] != draws[1]
    assert draws[2] == draws[3]


TOOL = {"type": "function", "function": {"name": "f"}}
PICTURE = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"n": True}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": "4"}, "max_tokens"),
        ({"stream": 1}, "stream"),
        ({"temperature": True}, "temperature"),
        ({"model": None}, "model"),
        ({"messages": [{"role": "user", "content": PICTURE}]}, "messages.0.content.1.type"),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [TOOL]}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content"),
        ({"stream_options": {"other": True}}, "stream_options.other"),
    ],
    ids=str,
)
def test_what_would_change_an_answer_is_refused_by_name(client, extra, param):
    refused = client.post("/v1/chat/completions", json=CHAT | extra)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert error["message"].startswith(param)


def test_a_refusal_says_what_it_got(client):
    refused = [client.post("/v1/completions", json=TEXT | extra) for extra in ({"best_of": 3}, {"min_tokens": 3})]
    assert [answer.json()["error"]["message"] for answer in refused] == [
        "best_of is 3; expected 1, as n is",
        "min_tokens is 3; expected no such field: it is not supported",
    ]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"stop": 5}, "stop is 5; expected a valid string"),
        ({"stop": ["a" * 1001]}, "stop.0 is 'aaaaaaaaaaaa...aaaaaaaaaaaaa'; expected at most 1000 characters"),
        ({"prompt": [["a"]]}, "prompt.0.0 is 'a'; expected a valid integer"),
        ({"prompt": {"a": 1}}, "prompt is {'a': 1}; expected a valid list"),
        ({"temperature": -1}, "temperature is -1; expected greater than or equal to 0"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x is 'x'; expected a valid integer"),
        ({"response_format": {"type": "x"}}, "response_format.type is 'x'; expected 'text', 'json_object' or"),
        (b'{"model": }', "the body is not readable as JSON (Expecting value); expected a JSON object"),
        (b"[]", "the body is []; expected "),
        (b'{"prompt": "a"}', "model is missing; expected a value"),
    ],
    ids=str,
)
def test_refusals_are_our_sentences_and_name_fields_of_the_body(client, body, said):
    content = body if isinstance(body, bytes) else json.dumps(TEXT | body).encode()
    answer = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    message = answer.json()["error"]["message"]
    assert (answer.status_code, message[: len(said)]) == (400, said)
    assert not re.search(r"should|constrained|Value error|\[key\]|function-|Input ", message)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": {"type": "x", "function": {"name": "f"}}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"messages": [{"role": "user", "content": 3, "message": {"content": 1}}]}, "messages.0.content"),
    ],
    ids=str,
)
def test_keys_named_as_a_kind_of_union_are_not_taken_for_it(client, body, param):
    error = client.post("/v1/chat/completions", json=CHAT | body).json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param} is ")


def test_the_parts_of_a_message_are_lines(client):
    parts = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
    answers = [
        client.post("/v1/chat/completions", json=CHAT | {"messages": [{"role": "user", "content": content}]}).json()
        for content in (parts, "be\nbrief")
    ]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]


def test_the_official_client_sends_its_history_back(server):
    api = server.openai_client("none")
    messages = [{"role": "user", "content": "hello"}]
    for _ in range(2):
        reply = api.chat.completions.create(
            model="letters",
            messages=messages,
            max_completion_tokens=4,
            metadata={},
            store=False,
            parallel_tool_calls=False,
        )
        messages += [
            reply.choices[0].message.model_dump(),
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
        ]
    assert reply.usage.prompt_tokens > len("user: hello\nassistant: ")
    text = api.completions.create(model="letters", prompt="a", best_of=1, suffix=None, user="a", logit_bias=None)
    assert text.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="tools is"):
        api.chat.completions.create(model="letters", messages=messages, tools=[TOOL])


def test_many_unknown_fields_are_one_error(client):
    body = {"model": "letters", "prompt": "a"} | {f"field{n}": 1 for n in range(2000)}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the body: 2002 fields; expected at most 1000"
