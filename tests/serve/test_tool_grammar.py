"""Calls that must fulfil their schemas: what random models write, and what grammars allow."""

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.serve.scripted import (
    ASK,
    END,
    PET,
    SMALL,
    STOP,
    WEATHER,
    WRITTEN,
    as_json,
    as_xml,
    calls_of,
    scripted,
    template,
)
from tests.serve.test_tool_reader import read
from tokenizers import Tokenizer

from recurra.data.tokenizers import ByteEncoder, BytePairEncoding
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.serve._chat_bodies import ChatBody
from recurra.serve._http import ApiError, ServeSettings
from recurra.serve._model import ServedModel
from recurra.serve._service import Service

from .conftest import Running

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def random_models() -> dict[str, ServedModel]:
    made = {}
    for name in ("json", "xml", "thinking-json", "thinking-xml"):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = LanguageModel(LanguageModelConfig(256, None, 1, 8, 8)).eval().double()
        text = template(name.split("-")[-1], "thinking" in name)
        made[name] = ServedModel(name, model, ByteEncoder(), chat_template=text)
    return made


@pytest.fixture(scope="module")
def drawing(random_models):
    with Running(Service(list(random_models.values()), ServeSettings(), threads=1)) as running:
        yield running.openai_client("none")


def fulfils(name: str, arguments: dict) -> bool:
    if name == "stop":
        return arguments == {}
    ages_fit = len(arguments["ages"]) <= 3 and all(type(age) is int and 0 <= age <= 99 for age in arguments["ages"])
    known = set(arguments) <= {"kind", "ages", "size", "tame"} and type(arguments.get("tame", True)) is bool
    return known and ages_fit and arguments["kind"] in ("cat", "dog") and arguments["size"] in (5, 6, 7)


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pet"}}], ids=["any", "pet"])
def test_a_random_model_calls_what_it_must(drawing, kind, choice):
    body = {"model": kind, "messages": ASK, "tools": [PET, STOP], "tool_choice": choice, "max_tokens": 3000}
    answer = drawing.chat.completions.create(**body, n=6, seed=3, parallel_tool_calls=False)
    found = [calls_of(one.message.model_dump()) for one in answer.choices]
    assert [one.finish_reason for one in answer.choices] == ["tool_calls"] * 6
    assert all(len(calls) == 1 and fulfils(*calls[0]) for calls in found)
    names = {calls[0][0] for calls in found}
    assert names == {"pet", "stop"} if choice == "required" else {"pet"}


@pytest.mark.parametrize("kind", WRITTEN)
def test_several_calls_end_where_the_chat_does(drawing, kind):
    body = {"model": kind, "messages": ASK, "tools": [STOP], "tool_choice": "required", "max_tokens": 3000}
    found = drawing.chat.completions.create(**body, n=40, seed=1).choices
    calls = [calls_of(one.message.model_dump()) for one in found]
    assert {one.finish_reason for one in found} == {"tool_calls"}
    assert all(call == ("stop", {}) for some in calls for call in some)
    assert len({len(some) for some in calls}) > 1


def test_reasoning_comes_before_what_is_forced(random_models):
    model = random_models["thinking-json"]
    answer = Probe(model, {"tools": [STOP], "tool_choice": "required"})
    assert answer.accepts("Hm <tool_call> hm</think>\n\n" + as_json("stop"))
    assert not answer.accepts(as_json("stop"))
    assert not answer.accepts("Hm</think>\n\nno")
    form = Probe(model, {"response_format": {"type": "json_object"}})
    assert form.accepts('Hm {"</think>\n\n{"a": 1}')
    assert not form.accepts('{"a": 1}')
    possible = Probe(model, {"tools": [STOP], "tool_choice": "required"}, prompt="assistant: ")
    assert possible.accepts(as_json("stop"))
    assert possible.accepts("<think>\nHm</think>\n\n" + as_json("stop"))


def test_tags_that_are_special_tokens_belong_to_a_call():
    pairs = Tokenizer.from_str(BytePairEncoding.train(["some text"], 260).to_json())
    pairs.add_special_tokens(["<tool_call>", "</tool_call>", "<|end|>"])
    encoding = BytePairEncoding(pairs)
    with torch.random.fork_rng():
        model = LanguageModel(LanguageModelConfig(len(encoding), None, 1, 8, 8)).eval()
    served = ServedModel("pairs", model, encoding, chat_template=template("json").replace("\\x03", "<|end|>"))
    probe = Probe(served, {"tools": [STOP], "tool_choice": "required"}, "")
    tokens = encoding.encode(as_json("stop")).tolist()
    begin, last, end = map(pairs.token_to_id, ("<tool_call>", "</tool_call>", "<|end|>"))
    assert (len(tokens) > 3, tokens[0], tokens[-1]) == (True, begin, last)
    for token in tokens:
        assert probe.constraint.allowed[token]
        assert not probe.constraint.allowed[end]
        probe.constraint.advance(token)
    assert probe.constraint.allowed[end]
    probe.constraint.advance(end)
    assert not probe.constraint.error


def test_a_chat_without_an_end_has_one_call(random_models):
    model = ServedModel(
        "endless", random_models["json"].plain, ByteEncoder(), chat_template='{{ tools }}<tool_call>"arguments"'
    )
    probe = Probe(model, {"tools": [STOP], "tool_choice": "required"}, prompt="")
    for token in as_json("stop").encode():
        assert not probe.constraint.is_complete
        probe.constraint.advance(token)
    assert probe.constraint.is_complete


class Probe:
    """The constraint of a request, without a server."""

    def __init__(self, model: ServedModel, body: dict, prompt: str = "<think>\n") -> None:
        body_ = ChatBody.model_validate({"model": model.name, "messages": ASK, **body})
        self.constraint = asyncio.run(body_.constraint(model, body_.form(model, prompt)))

    def accepts(self, text: str) -> bool:
        """Whether the text may be generated, and be the whole answer."""
        constraint = self.constraint.copy()
        for token in text.encode():
            if not constraint.allowed[token]:
                return False
            constraint.advance(token)
        return constraint._matcher.is_accepting() and (constraint.is_complete or bool(constraint.allowed[ord(END)]))


STRICT = {"type": "function", "function": {"name": "pet", "parameters": SMALL, "strict": True}}


@pytest.mark.parametrize("kind", WRITTEN)
def test_strict_tools_may_be_called_and_then_fulfil_their_schema(random_models, kind):
    probe = Probe(random_models[kind], {"tools": [STRICT, WEATHER]}, prompt="")
    good = WRITTEN[kind]("pet", kind="cat", ages=[1, 2], size=6)
    assert probe.accepts("No tools, <tool then")
    assert probe.accepts(f"So: {good}")
    assert probe.accepts(f"{good}\n{good} and")
    assert not probe.accepts(WRITTEN[kind]("pet", kind="cow", ages=[1, 2], size=6))
    assert not probe.accepts(WRITTEN[kind]("pet", kind="cat", size=6))
    assert not probe.accepts(WRITTEN[kind]("pet", kind="cat", ages=[1, 2], size=9))
    assert not probe.accepts(WRITTEN[kind]("cat"))
    assert probe.accepts(WRITTEN[kind]("weather", anything="goes", here=[1]))  # which is not strict
    single = Probe(random_models[kind], {"tools": [STRICT], "parallel_tool_calls": False}, prompt="")
    assert single.accepts(good)
    assert single.accepts("text")
    assert not single.accepts(f"{good}\n{good}")


def test_texts_as_xml_end_where_the_reader_ends_them(random_models):
    properties = {"city": {"type": "string"}, "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]}}
    schema = {"properties": properties, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    probe = Probe(random_models["xml"], {"tools": [tool], "tool_choice": "required"}, prompt="")
    assert probe.accepts(as_xml("f", city='<b> "Zürich"\n{', unit=None))
    assert probe.accepts(as_xml("f", city=""))
    assert not probe.accepts(as_xml("f", unit="a"))
    assert not probe.accepts(as_xml("f", city="a</parameter> b"))


@pytest.mark.parametrize(
    ("properties", "more", "reason"),
    [
        ({"a": {"type": "string", "maxLength": 3}}, {}, "schema of f.a is a string with 'maxLength'"),
        ({"a": {"type": "string", "pattern": "b"}}, {}, "a string with 'pattern'"),
        ({"a": {"type": ["string", "array"]}}, {}, "a string, an array or an object"),
        (
            {"a": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}},
            {},
            "a string with 'format'",
        ),
        ({"a>": {"type": "integer"}}, {}, "a parameter 'a>'"),
        ({}, {"minProperties": 1}, "schema of f is an object with 'minProperties'"),
        ({}, {"allOf": []}, "'allOf'"),
        (
            {"a": {"type": "integer", "not": {"const": 1}}},
            {},
            "the schema of f is one that cannot be used (Unimplemented keys",
        ),
        (
            {"a": {"const": "x\n</parameter>\n</function>"}},
            {},
            "f.a is one that allows a value with </parameter>",
        ),
        ({"a": {"enum": ["b", "</function>"]}}, {}, "f.a is one that allows a value with </function>"),
    ],
    ids=str,
)
def test_schemas_that_xml_cannot_meet_are_refused(random_models, properties, more, reason):
    schema = {"type": "object", "properties": properties, **more}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    with pytest.raises(ApiError) as refused:
        Probe(random_models["xml"], {"tools": [tool]})
    assert (refused.value.status, refused.value.param) == (400, "tools")
    assert reason in refused.value.message
    assert " | " not in refused.value.message  # as in lines of a grammar


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": []},
        {"properties": 3},
        {"required": "a"},
        {"required": [1]},
        {"properties": {"a": {"enum": 3}}},
        {"properties": {"a": {"anyOf": 3}}},
        {"properties": {"a": {"anyOf": [3]}}},
        {"properties": {"a": {"type": 3}}},
        {"properties": {"a": {"type": "integer", "minimum": "b"}}},
        {"properties": {"a": {"$ref": "file:///etc/passwd"}}},
        {"properties": {"a": {"type": "integer", "$ref": "#anchor"}}},
        {"properties": {"a": {"type": "array", "items": {"$dynamicRef": "#a"}}}},
        {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$dynamicRef": "#a"}}},
    ],
    ids=str,
)
def test_what_is_no_schema_is_refused(random_models, kind, schema):
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    with pytest.raises(ApiError) as refused:
        Probe(random_models[kind], {"tools": [tool]})
    assert refused.value.status == 400
    assert ("$dynamicRef" in str(schema)) == ("$dynamicRef" in refused.value.message)


PUBLISHED = {
    "qwen2_5": ("none", "json"),
    "qwen3": ("possible", "json"),
    "qwen3_5_think": ("open", "xml"),
    "qwen3_6": ("open", "xml"),
    "nemotron_3_nano": ("open", "xml"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_write_answers_that_are_read_back(name):
    """What a template makes of an answer is what the model has learned to write; a grammar must allow it too."""
    trl = find_spec("trl")
    if trl is None or trl.origin is None:
        pytest.skip("needs the templates of TRL: pip install trl")
    text = (Path(trl.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    model = scripted(name, '{% set eos_tokens = ["<|im_end|>"] %}' + text)
    calls = [
        {"function": {"name": "pet", "arguments": {"kind": "dog", "ages": [1, 2], "size": 5}}},
        {"function": {"name": "stop", "arguments": {}}},
    ]
    answer = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": calls}
    prompt = model.chat_text(ASK, [PET, STOP])
    whole = model.chat_text([*ASK, answer, {"role": "tool", "content": "yes"}], [PET, STOP])
    assert whole.startswith(prompt)
    body = ChatBody(model=name, messages=ASK, tools=[PET, STOP], tool_choice="required")
    form = body.form(model, prompt)
    assert (form.reasoning, form.calls) == PUBLISHED[name]
    written = whole[len(prompt) :].split("<|im_end|>")[0]
    found = read(form, [written])
    assert ("True", "Hm.") in found or name == "qwen2_5"
    called = [(name, json.loads(arguments)) for name, arguments in found if name in ("pet", "stop")]
    assert called == [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    constraint = asyncio.run(body.constraint(model, form))
    for token in written.rstrip("\n").encode():
        assert constraint.allowed[token]
        constraint.advance(token)
    assert constraint._matcher.is_accepting()
