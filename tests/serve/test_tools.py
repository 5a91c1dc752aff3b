"""Tools and reasoning in chats over HTTP: prompts, and answers taken apart, whole and as streams."""

import json
import re
from pathlib import Path

import openai
import pydantic
import pytest
from tests.serve.scripted import ASK, CLOCK, WEATHER, WRITTEN, as_json, as_xml, calls_of, says, scripted, template

from recurra.data.tokenizers import ByteEncoder
from recurra.serve._http import ServeSettings
from recurra.serve._model import ServedModel
from recurra.serve._service import Service

from .conftest import Running


@pytest.fixture(scope="module")
def models() -> dict[str, ServedModel]:
    made = {kind: scripted(kind, template(kind)) for kind in ("json", "xml", "none")}
    made["plain"] = scripted("plain", "{% for m in messages %}{{ m.content }}{% endfor %}")
    thinking = {f"thinking-{kind}": scripted(f"thinking-{kind}", template(kind, thinks=True)) for kind in WRITTEN}
    return made | thinking


@pytest.fixture(scope="module")
def server(models):
    with Running(Service(list(models.values()), ServeSettings(), threads=1)) as running:
        yield running


@pytest.fixture(scope="module")
def api(server) -> openai.OpenAI:
    return server.openai_client("none")


def streamed(api, **body):
    """Put the deltas of one choice together, as clients do."""
    message: dict = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    for chunk in api.chat.completions.create(stream=True, **body):
        (choice,) = chunk.choices
        assert reason is None
        delta, reason = choice.delta.model_dump(exclude_unset=True), choice.finish_reason
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(message["tool_calls"]):
                assert call["id"].startswith("call_")
                assert call["type"] == "function"
                assert call["function"]["name"]
                assert call["function"]["arguments"] == ""
                message["tool_calls"].append(call)
            else:
                assert call["index"] == len(message["tool_calls"]) - 1
                message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    return message, reason


def ask(api, model: ServedModel, text: str, opening: str = "<think>\n", **body):
    """Let a model answer with a text; return the message, which is the same as a stream, and the reason of its end."""
    says(model, (opening if "thinking" in model.name else "") + text)
    body = {"model": model.name, "messages": ASK, "max_tokens": 5000, "temperature": 0, **body}
    (choice,) = api.chat.completions.create(**body).choices
    message = choice.message.model_dump()
    parts, reason = streamed(api, **body)
    for name in ("content", "reasoning_content"):
        assert parts[name] == (message.get(name) or "")
    functions = [call["function"] for call in message["tool_calls"] or ()]
    assert [call["function"] for call in parts["tool_calls"]] == functions
    assert reason == choice.finish_reason
    return message, reason


# --- answers over HTTP ---


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_call(api, models, kind):
    arguments = {"city": 'Zürich "日本" 🌧', "days": 3, "exact": True, "places": [47.4, 8], "unit": None}
    text = "Let me look.\n\n" + WRITTEN[kind]("weather", **arguments)
    message, reason = ask(api, models[kind], text, tools=[WEATHER, CLOCK])
    assert (message["content"], reason) == ("Let me look.", "tool_calls")
    assert calls_of(message) == [("weather", arguments)]


@pytest.mark.parametrize("kind", WRITTEN)
def test_several_calls_without_text(api, models, kind):
    write = WRITTEN[kind]
    text = "\n".join([write("weather", city="Basel"), write("clock"), write("weather", city="Bern", days=0)])
    message, reason = ask(api, models[kind], text, tools=[WEATHER, CLOCK])
    assert (message["content"], reason) == (None, "tool_calls")
    expected = [("weather", {"city": "Basel"}), ("clock", {}), ("weather", {"city": "Bern", "days": 0})]
    assert calls_of(message) == expected
    message, _ = ask(api, models[kind], text, tools=[WEATHER, CLOCK], parallel_tool_calls=False)
    assert calls_of(message) == expected[:1]


@pytest.mark.parametrize("kind", WRITTEN)
def test_reasoning_and_a_call(api, models, kind):
    model, call = models[f"thinking-{kind}"], WRITTEN[kind]("clock")
    message, reason = ask(api, model, f"It is <late>.\n</think>\n\nHm.\n\n{call}", tools=[CLOCK])
    assert (message["reasoning_content"], message["content"], reason) == ("It is <late>.", "Hm.", "tool_calls")
    assert calls_of(message) == [("clock", {})]
    message, reason = ask(api, model, f"A plan: {call}\n</think>\n\nNo.", tools=[CLOCK])
    assert (message["reasoning_content"], message["content"], reason) == (f"A plan: {call}", "No.", "stop")
    message, reason = ask(api, model, f"No end.\n{call}", tools=[CLOCK])  # as models forget it
    assert (message["reasoning_content"], message["content"], reason) == ("No end.", None, "tool_calls")


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("Hm.\n</think>\n\nYes.\n", "Hm.", "Yes.\n"),
        ("<think>\nHm.</think>Yes.", "Hm.", "Yes."),
        ("Hm. It is cut </thi", "Hm. It is cut </thi", None),
        ("</think>\n\nYes </think> no", None, "Yes </think> no"),
    ],
)
def test_reasoning_that_the_prompt_has_opened(api, models, text, reasoning, content):
    message, reason = ask(api, models["thinking-json"], text)
    assert (message.get("reasoning_content"), message["content"], reason) == (reasoning, content, "stop")


def test_reasoning_that_is_off(api, models):
    off = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    message, _ = ask(api, models["thinking-json"], "<think>no</think>", "<think>\n\n</think>\n\n", **off)
    assert ("reasoning_content" in message, message["content"]) == (False, "<think>no</think>")
    message, _ = ask(api, models["json"], "<think>no</think>")  # whose template has no such tags
    assert message["content"] == "<think>no</think>"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", '<tool_call>\n{"name": "clock", "arguments": }\n</tool_call>'),
        ("json", '<tool_call>\n{"arguments": {"a": NaN}, "name": "clock"}\n</tool_call>'),
        ("json", '<tool_call>\n{"arguments": {"a": 1e999}, "name": "clock"}\n</tool_call>'),
        ("json", '<tool_call>\n{"name": "clock", "arguments": [1]}\n</tool_call>'),
        ("json", '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>'),
        ("json", '<tool_call>\n{"arguments": {}, "name": "clock"}\n'),
        ("json", '<tool_call>\n{"arguments": {}, "name": "clock"} and more\n</tool_call>'),
        ("json", '<tool_call>\n{"name": "clo\nck", "arguments": {}}\n</tool_call>'),
        ("json", '<tool_call>\n{"arguments": {"a": "\\ud800"}, "name": "clock"}\n</tool_call>'),
        ("json", '<tool_call>\n{"arguments": {"\\udfff": 1}, "name": "clock"}\n</tool_call>'),
        ("json", '<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>'),
        ("json", "<tool_call>clock()</tool_call>"),
        ("json", "<tool_call>"),
        ("json", "a < b <tool"),
        ("json", as_xml("clock")),
        ("xml", as_json("clock")),
        ("xml", "<tool_call>\n<function=clock>\n</tool_call>"),
        ("xml", "<tool_call>\n<function=clock>\n</function>\n</tool"),
        ("xml", "<tool_call>\n<function=clock\n>\n</function>\n</tool_call>"),
        ("xml", "<tool_call>\n<function=weather>\n<parameter=city>\nBasel</function>\n</tool_call>"),
    ],
)
def test_what_is_no_call_stays_text(api, models, kind, text):
    message, reason = ask(api, models[kind], f"So: {text}", tools=[WEATHER, CLOCK])
    assert (message["content"], message["tool_calls"], reason) == (f"So: {text}", None, "stop")


def test_half_of_a_surrogate_pair_in_an_argument_as_xml_leaves_it_a_text(api, models):
    text = as_xml("weather", city="a", places='["\\ud800"]')
    message, _ = ask(api, models["xml"], text, tools=[WEATHER])
    assert calls_of(message) == [("weather", {"city": "a", "places": '["\\ud800"]'})]


def test_parameters_in_place_of_arguments(api, models):
    text = '<tool_call>\n{"name": "weather", "parameters": {"city": "a"}}\n</tool_call>'
    message, _ = ask(api, models["json"], text, tools=[WEATHER])
    assert calls_of(message) == [("weather", {"city": "a"})]


HALF = "\ud800"
HALVES = [
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {HALF: 1}}}]},
        "tools.0.function.parameters",
    ),
    ({"chat_template_kwargs": {"enable_thinking": [HALF]}}, "chat_template_kwargs"),
    ({HALF: 1}, None),
]
HALF_FORM = {"type": "json_schema", "json_schema": {"schema": {"const": HALF}}}


@pytest.mark.parametrize(("extra", "param"), HALVES, ids=range(len(HALVES)))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_half_of_a_surrogate_pair_is_refused_by_field(server, path, extra, param):
    body = {"model": "thinking-json", "messages": ASK, **extra}
    answer = server.client().post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    body = {"model": "json", "messages": ASK, "response_format": HALF_FORM}
    answer = server.client().post(
        "/v1/chat/completions", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format.json_schema.schema")


@pytest.mark.parametrize("arguments", ["{}", "", '{"a": "b', '{"a": "\\ud800"}', "[" * 10_000], ids=len)
def test_a_call_put_together_from_a_stream_is_sent_back(server, arguments):
    """Also one that is malformed or cut off."""
    call = {"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    body = {"model": "json", "messages": [*ASK, {"role": "assistant", "tool_calls": [call]}]}
    assert server.client().post("/tokenize", json=body).status_code == 200


@pytest.mark.parametrize(
    ("written", "arguments", "content"),
    [
        ('{"a": NaN}}\n</tool_call>', '{"a": NaN}', None),
        ("{}", "{}", None),
        ('{"a": {"b": "c', '{"a": {"b": "c', None),
        ("{}} and more", "{}", "and more"),
        ('{"a": 1}, "id": {"b": [3]}}\n</tool_call>', '{"a": 1}', None),
        ('{"a": 1}}}}\n</tool_call>more', '{"a": 1}', "more"),
        ('{"a": 1}, "id": </tool_call>more', '{"a": 1}', ', "id": </tool_call>more'),
        ('{"a": </tool_call> more', '{"a": ', "more"),
        ('{"a": "b\nc"}}</tool_call>', '{"a": "b', 'c"}}</tool_call>'),
    ],
)
def test_arguments_are_passed_on_as_they_are_written(api, models, written, arguments, content):
    text = f'<tool_call>{{"name": "clock", "arguments": {written}'
    message, reason = ask(api, models["json"], text, tools=[CLOCK])
    found = [call["function"] for call in message["tool_calls"]]
    assert (found, reason) == ([{"name": "clock", "arguments": arguments}], "tool_calls")
    assert message["content"] == content


def test_arguments_come_in_pieces(api, models):
    says(models["json"], as_json("weather", city="Zürich", days=3))
    body = {"model": "json", "messages": ASK, "tools": [WEATHER], "temperature": 0, "max_tokens": 500}
    calls = []
    for chunk in api.chat.completions.create(stream=True, **body):
        calls += chunk.choices[0].delta.tool_calls or ()
    assert [(call.index, call.function.name) for call in calls] == [(0, "weather"), *[(0, None)] * (len(calls) - 1)]
    pieces = [call.function.arguments for call in calls]
    assert json.loads("".join(pieces)) == {"city": "Zürich", "days": 3}
    assert max(map(len, pieces)) == 1  # as the model writes bytes


def test_a_call_that_is_cut_off_before_its_arguments_stays_text(api, models):
    text = as_json("weather", city="Basel")
    message, reason = ask(api, models["json"], text, tools=[WEATHER], max_tokens=30)
    assert (message["content"], message["tool_calls"], reason) == (text[:30], None, "length")
    message, reason = ask(api, models["json"], f"{text}\n{text}", tools=[WEATHER], max_tokens=len(text) + 9)
    assert (message["content"], len(message["tool_calls"]), reason) == ("<tool_ca", 1, "length")


@pytest.mark.parametrize(
    "bad", ["<tool_call>{oops <tool_call>", '<tool_call>\n{"name": "clo', '<tool_call>{"a": 1}} a']
)
def test_a_good_call_after_a_bad_one(api, models, bad):
    message, reason = ask(api, models["json"], f"{bad}\n{as_json('clock')}", tools=[CLOCK])
    assert (message["content"], reason) == (bad, "tool_calls")
    assert calls_of(message) == [("clock", {})]


NASTY = [
    '</tool_call> "quoted" \\ \n <tool_call> {}[]',
    "</parameter> in\n</parameter>\ntext</function",
    "é" * 50,
    "\ud7ff\U0001f9d1\u200d\U0001f680 日本\u2028語",
    "",
    " \n ",
]


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
def test_arguments_that_look_like_tags(api, models, kind, text):
    message, _ = ask(api, models[kind], WRITTEN[kind]("weather", city=text), tools=[WEATHER])
    assert calls_of(message) == [("weather", {"city": text})]


def test_deep_arguments(api, models):
    deep: list = []
    for _ in range(20):
        deep = [deep, {"]": "{"}]
    for kind, write in WRITTEN.items():
        message, _ = ask(api, models[kind], write("weather", city="a", places=deep), tools=[WEATHER])
        assert calls_of(message) == [("weather", {"city": "a", "places": deep})]


def test_log_probabilities_are_those_of_all_tokens(api, models):
    text = f"Hm.\n</think>\n\nI look. {as_json('clock')}"
    says(models["thinking-json"], "<think>\n" + text)
    body = {"model": "thinking-json", "messages": ASK, "tools": [CLOCK], "temperature": 0, "logprobs": True}
    (choice,) = api.chat.completions.create(**body).choices
    assert "".join(token.token for token in choice.logprobs.content) == text
    chunks = [chunk.choices[0] for chunk in api.chat.completions.create(**body, stream=True)]
    told = [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.content]
    assert told == choice.logprobs.content


def test_openais_helpers_understand_the_answers(api, models):
    class Weather(pydantic.BaseModel):
        city: str
        days: int | None = None

    for kind, write in WRITTEN.items():
        says(models[kind], "Yes. " + write("Weather", city="Bern", days=2))
        body = {"model": kind, "messages": ASK, "tools": [openai.pydantic_function_tool(Weather)]}
        with api.chat.completions.stream(**body) as stream:
            streamed = stream.get_final_completion()
        for answer in (api.chat.completions.parse(**body), streamed):
            (call,) = answer.choices[0].message.tool_calls
            assert answer.choices[0].message.content == "Yes."
            assert call.function.parsed_arguments == Weather(city="Bern", days=2)


# --- prompts ---


def test_the_prompt_is_that_of_transformers(models, server):
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install recurra[hf]")
    calls = [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich", "days": 2}'}},
        {"id": "b", "type": "function", "function": {"name": "clock", "arguments": ""}},
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "Hm.", "refusal": None},
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "noon"}]},
        {"role": "assistant", "content": None, "tool_calls": None, "reasoning_content": "Cut."},
        *ASK,
    ]
    theirs = json.loads(json.dumps(messages))
    theirs[2]["content"], theirs[4]["content"], theirs[5]["content"] = "", "noon", ""
    for call, arguments in zip(theirs[2]["tool_calls"], ({"city": "Zürich", "days": 2}, {})):
        call["function"]["arguments"] = arguments
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=ByteEncoder().as_byte_pairs()._tokenizer, eos_token=None
    )
    client, strict = server.client(), {"type": "function", "function": CLOCK["function"] | {"strict": True}}
    for name, model in models.items():
        if name in ("none", "plain"):
            continue
        for variables in ({}, {"enable_thinking": False}) if "thinking" in name else ({},):
            expected = tokenizer.apply_chat_template(
                theirs,
                tools=[WEATHER, CLOCK],
                chat_template=model.chat_template,
                add_generation_prompt=True,
                tokenize=False,
                **variables,
            )
            body = {"model": name, "messages": messages, "tools": [WEATHER, strict], "chat_template_kwargs": variables}
            tokens = client.post("/tokenize", json=body).json()["tokens"]
            assert bytes(tokens).decode() == expected
            assert '"city": "Zürich"' in expected or "<parameter=city>\nZürich\n" in expected


def test_tools_that_are_off_are_not_in_the_prompt(api, models):
    text = as_json("clock")
    message, reason = ask(api, models["json"], text, tools=[CLOCK], tool_choice="none")
    assert (message["content"], reason) == (text, "stop")
    says(models["json"], text)
    body = {"model": "json", "messages": ASK, "temperature": 0}
    usage = [
        api.chat.completions.create(**body, **more).usage for more in ({}, {"tools": [CLOCK], "tool_choice": "none"})
    ]
    assert usage[0].prompt_tokens == usage[1].prompt_tokens


CALLED = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("model", "extra", "param", "reason"),
    [
        ("plain", {"tools": [CLOCK]}, "tools", "the chat template of plain knows no tools"),
        ("none", {"tools": [CLOCK]}, "tools", "the chat template of none calls tools in no format that is known"),
        ("json", {"tools": [CLOCK, CLOCK]}, "tools", "two functions named 'clock'"),
        ("json", {"tools": [{"type": "web_search"}]}, "tools.0.type", "'web_search'"),
        ("json", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "'a b'"),
        ("json", {"tool_choice": "required"}, "tool_choice", "without tools"),
        ("json", {"tools": [CLOCK], "tool_choice": "any"}, "tool_choice", "'any'"),
        (
            "json",
            {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
            "the function 'other'",
        ),
        ("json", {"tools": [CLOCK], "response_format": {"type": "json_object"}}, "response_format", "are both given"),
        ("json", {"tools": [CLOCK], "structured_outputs": {"regex": "a"}}, "structured_outputs", "are both given"),
        ("json", {"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "variables of the chat"),
        ("thinking-json", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", ": enable_thinking"),
        ("json", {"messages": [{"role": "tool", "content": "a"}]}, "messages.0.tool_call_id", "missing"),
        ("json", {"messages": [{"role": "user", "content": "a", "tool_calls": [CALLED]}]}, "messages.0.role", "'user'"),
        (
            "json",
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [CALLED | {"function": {"name": "f", "arguments": "[]"}}]}
                ]
            },
            "messages.0.tool_calls.0.function.arguments",
            "not a JSON object",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused(server, model, extra, param, reason):
    body = {"model": model, "messages": ASK, "max_tokens": 1, **extra}
    answer = server.client().post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert reason in error["message"]


def test_a_template_gets_no_further_with_tools(serving):
    """It stays in its sandbox: no attributes of objects, no files, no changes of what it is given."""
    for attack in (
        "{{ tools.__class__.__mro__ }}",
        "{{ tools[0].function.name.__init__.__globals__ }}",
        "{% set _ = tools.append(1) %}",
        "{% include '/etc/passwd' %}",
        "{{ range(999999) | list }}",
        "{{ messages[0].content.format_map(tools[0]) }}{{ '{0.__class__}'.format(tools) }}",
    ):
        model = scripted("attack", '{# <tool_call> "arguments" #}{{ tools | length }}' + attack)
        body = {"model": "attack", "messages": ASK, "tools": [CLOCK], "max_tokens": 1}
        answer = serving(models=[model]).client().post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 or "class" not in answer.text


# --- conversations ---


@pytest.mark.parametrize("name", ["json", "thinking-xml"])
def test_the_second_turn_reads_only_what_is_new(serving, name):
    model = scripted(name, template(name.split("-")[-1], thinks="thinking" in name))
    api = serving(models=[model]).openai_client("none")
    call = WRITTEN[name.split("-")[-1]]("weather", city="Zürich", days=1)
    says(model, f"<think>\nI look.\n</think>\n\n{call}" if "thinking" in name else call, "Yes.")
    body = {"model": name, "tools": [WEATHER], "temperature": 0, "max_tokens": 500}
    first = api.chat.completions.create(messages=ASK, **body)
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It rains."}
    second = api.chat.completions.create(messages=[*ASK, message.model_dump(), result], **body)
    n_new = second.usage.prompt_tokens - second.usage.prompt_tokens_details.cached_tokens
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + len(call)
    assert n_new <= len("\x03\ntool: It rains.\nassistant: \x02<think>\n") + 1


def test_the_example_of_the_page(serving, capsys):
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    for kind, write in WRITTEN.items():
        model = scripted("NAME", template(kind))
        says(model, write("forecast", city="Zürich", days=2), write("forecast", city="Bern", days=1), "Take a coat.")
        exec(example.replace("http://127.0.0.1:8000", serving(models=[model]).url), {})
        assert capsys.readouterr().out == "Take a coat.\n"
