"""Answers of chats taken apart, piece by piece: any cut, any text, in linear time; types of arguments."""

import json
import random

import pytest
from tests.serve.scripted import PARAMETERS, WRITTEN, as_xml, scripted

from recurra.serve import _schemas
from recurra.serve._tools import AnswerForm, AnswerReader, Call, ChatFormat, Piece, Tool

TOOLS = [Tool("weather", PARAMETERS)]


def read(form: AnswerForm, pieces: list[str]) -> list[tuple[str, ...]]:
    """Return calls as (name, arguments), and other text as ("True" for reasoning, text)."""
    reader, found = AnswerReader(form), []
    for index, piece in enumerate(pieces):
        for part in reader.add(piece, is_last=index + 1 == len(pieces)):
            if isinstance(part, Call):
                found.append((part.name, ""))
            elif not isinstance(part, Piece) or (found and found[-1][0] == str(part.is_reasoning)):
                found.append((found[-1][0], found.pop()[1] + part.text))
            else:
                found.append((str(part.is_reasoning), part.text))
    return found


@pytest.mark.parametrize("kind", WRITTEN)
def test_cuts_change_nothing(kind):
    """Random mixtures of tags, calls and text, cut at random."""
    rng, write = random.Random(0), WRITTEN[kind]
    words = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<function=weather>", "</function>", "{", "}", '"']
    words += ["<parameter=city>", "</parameter>", "\n", " ", "a", "\\", "<", write("weather", city="B", days=2)]
    words += ['{"name": "weather", "arguments": {', '"é', "<parameter=places>", "[", "]"]
    for _ in range(300):
        form = AnswerForm(rng.choice(["none", "possible", "open"]), kind, TOOLS, several=rng.random() < 0.5)
        text = "".join(rng.choices(words, k=rng.randrange(12)))
        places = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
        cut = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)])]
        assert read(form, cut) == read(form, [text]) == read(form, [*text, ""])


def test_a_huge_argument():
    text = 'é "\\ </tool_call>\n' * 30_000
    for kind, write in WRITTEN.items():
        written = write("weather", city=text)
        ((name, arguments),) = read(
            AnswerForm("none", kind, TOOLS), [written[n : n + 7] for n in range(0, len(written), 7)]
        )
        assert (name, json.loads(arguments)) == ("weather", {"city": text})


def test_a_call_that_is_nested_too_deep_stays_text():
    text = '<tool_call>{"a": ' + "[" * 1500 + "]" * 1500 + "}</tool_call>"
    assert read(AnswerForm("none", "json", TOOLS), [text]) == [("False", text)]


def test_the_time_to_read_an_answer_is_linear():
    """Counted in characters that are looked at: texts of tags that never end."""
    size = 20_000
    for kind, unit in (("json", '<tool_call>{"'), ("xml", "<tool_call><function=f><parameter=k>"), ("json", "\n")):
        form, looked = AnswerForm("none", kind, TOOLS), 0
        reader = AnswerReader(form)
        text = unit * (size // len(unit))
        for letter in text:
            before = reader._at
            reader.add(letter)
            looked += max(0, len(reader._text) - min(before, len(reader._text)))
        reader.add("", is_last=True)
        assert looked < 200 * size


def test_only_what_may_be_part_of_a_tag_is_kept():
    reader, most = AnswerReader(AnswerForm("possible", "json", TOOLS)), 0
    text = "<think>" + "é < " * 500 + "</think>" + "text <tool " * 500
    for letter in text + WRITTEN["json"]("weather", city="<" * 2000, places=[1] * 500):
        reader.add(letter)
        most = max(most, len(reader._text))
    assert most <= len('<tool_call>\n{"name": "weather", "arguments": {')
    assert reader.n_calls == 1


ENDS = "</parameter>\n</function>", "</parameter></function>", "</parameter>", "</function>\n</tool_call>"


@pytest.mark.parametrize("end", ENDS)
def test_values_as_xml_that_contain_closing_tags(end):
    form = AnswerForm("none", "xml", [Tool("f", {"properties": {"o": {"type": "object"}, "a": {"type": "array"}}})])
    arguments = {"o": {"k": f'"{end}'}, "a": [[end, "\\"], end + "</tool_call>"], "s": f"a {end} b"}
    written = as_xml("f", **arguments)
    for pieces in ([written], [*written]):
        ((name, found),) = read(form, pieces)
        assert (name, json.loads(found)) == ("f", arguments)
    broken = as_xml("f", o='{"a": "b', s="c") + "\n" + as_xml("f")
    (_, found), second = read(form, [broken])
    assert (json.loads(found), second) == ({"o": '{"a": "b', "s": "c"}, ("f", "{}"))


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        ("3.5", {"type": "number"}, 3.5),
        ("3", {"type": "string"}, "3"),
        ("3", {}, "3"),
        ("3", None, "3"),
        ("true", {"type": "boolean"}, True),
        ("True", {"type": "boolean"}, True),
        ("three", {"type": "integer"}, "three"),
        ("None", {"type": ["integer", "null"]}, None),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("null", {"type": "string"}, "null"),
        ('"a"', {"type": ["string", "null"]}, '"a"'),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ('{"a": NaN}', {"type": "object"}, '{"a": NaN}'),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"$ref": "#/$defs/number"}, 2),
        ("2", {"$ref": "#/$defs/loop"}, "2"),
        ("[" * 9999, {"type": "array"}, "[" * 9999),
    ],
)
def test_types_of_arguments_as_xml(text, schema, value):
    properties = {} if schema is None else {"key": schema}
    root = {"properties": properties, "$defs": {"number": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}
    ((_, arguments),) = read(AnswerForm("none", "xml", [Tool("f", root)]), [as_xml("f", key=text)])
    assert json.loads(arguments) == {"key": value}


def test_a_schema_is_looked_at_once(monkeypatch):
    """Each of seven options is the schema itself, and so on: counted in references that are followed."""
    referred, followed = _schemas._referred, []
    monkeypatch.setattr(_schemas, "_referred", lambda *given: followed.append(given[0]) or referred(*given))
    schema = {"anyOf": [*[{"$ref": "#/properties/key"}] * 7, {"type": "integer"}]}
    assert _schemas.ArgumentTypes({"properties": {"key": schema}}).of("key") == {"integer"}
    assert len(followed) <= 7


@pytest.mark.parametrize(
    ("text", "calls", "reasons"),
    [
        ('{{- "<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}" }}', "json", False),
        ("""'<tool_call>\n{"arguments": <args-dict>, "name": <function-name>}\n</tool_call>'""", "json", False),
        ("<think></think><tool_call>\n<function=example_function_name>\n<parameter=example>", "xml", True),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key> {{ call.arguments }}", None, False),  # GLM
        ("<minimax:tool_call>\n<invoke name=", None, False),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}]', None, False),
        ("<think>", None, False),
    ],
)
def test_formats_are_found_in_templates(text, calls, reasons):
    assert ChatFormat.of(text) == ChatFormat(calls, reasons)


def test_tools_are_found_where_a_template_may_set_them_itself():
    """As Granite 4 does."""
    start = "{% if available_tools is defined %}{% set tools = available_tools %}{% endif %}"
    text = start + """{% if tools %}{{ '<tool_call>{\\"arguments\\": ...}' + tools | tojson }}{% endif %}"""
    tools = [{"type": "function", "function": {"name": "f"}}]
    expected = '<tool_call>{"arguments": ...}' + json.dumps(tools)
    assert scripted("granite", text).chat_text([], tools) == expected
