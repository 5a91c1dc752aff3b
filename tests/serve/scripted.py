"""A model that says what a test tells it, byte by byte, chat templates that call tools, and tools."""

import json
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recurra.data.tokenizers import ByteEncoder
from recurra.serve._model import ServedModel

START, END = "\x02", "\x03"
"""Before an answer, and after it."""

_HEAD = """{%- set eos_tokens = ["\\x03"] %}
{%- if tools %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- 'Answer: FORMAT\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- message.role + ': ' }}
    {%- if message.role == 'assistant' %}
        {{- '\\x02' + THOUGHT + message.content|trim }}
        {%- for call in message.tool_calls %}
            {%- set call = call.function %}
            {{- '\\n' if loop.index0 or message.content|trim }}"""
_TAIL = """
        {%- endfor %}
        {{- '\\x03' }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{{- 'assistant: \\x02' + OPENING }}"""
_JSON = """
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson + '}\\n</tool_call>' }}"""
_XML = """
            {{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
            {%- for key, value in call.arguments|items %}
                {{- '<parameter=' + key + '>\\n' }}
                {{- value if value is string else value | tojson }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}"""


def template(calls: str, thinks: bool = False) -> str:
    """calls: "json", "xml" or "none"; thinks: an answer begins with reasoning, unless enable_thinking is off."""
    body = {"json": _JSON, "xml": _XML, "none": "{{- call.name }}"}[calls]
    text = _HEAD.replace("FORMAT", {"json": "<tool_call>{...}", "xml": "<function=NAME>"}.get(calls, "")) + body + _TAIL
    if not thinks:
        return text.replace("THOUGHT", "''").replace("OPENING", "''")
    thought = "('<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' if message.reasoning_content else '')"
    opening = "('<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '<think>\\n')"
    return text.replace("THOUGHT", thought).replace("OPENING", opening)


@dataclass(frozen=True)
class _Config:
    vocab_size: int = 256
    d_model: int = 1


class _State(NamedTuple):
    place: Tensor  # the number of answers before this one, and the position in it; -1 before the first


class _Scripted(nn.Module):
    """After the n-th byte START, it writes the n-th text of its script, or the last one, and then END for ever."""

    config = _Config()

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1,), 100.0))
        self.script = torch.tensor([[ord(END)]])

    def initial_state(self, n: int) -> _State:
        return _State(torch.full((n, 2), -1.0))

    def hidden(self, tokens: Tensor, state: _State) -> tuple[Tensor, _State]:
        (answer, position), (last, end) = state.place.long().unbind(1), (size - 1 for size in self.script.shape)
        found = []
        for column in tokens.unbind(1):
            begins = column == ord(START)
            answer, position = answer + begins.long(), torch.where(begins, 0, position + 1)
            found.append(self.script[answer.clamp(0, last), position.clamp(0, end)])
        hidden = nn.functional.one_hot(torch.stack(found, 1), 256).float()
        return hidden * self.scale, _State(torch.stack([answer, position], 1).float())

    def head(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, tokens: Tensor, state: _State | None = None) -> tuple[Tensor, _State]:
        return self.hidden(tokens, self.initial_state(len(tokens)) if state is None else state)


def scripted(name: str, template: str) -> ServedModel:
    """Return a model whose answers are what `says` sets."""
    return ServedModel(name, _Scripted().eval(), ByteEncoder(), chat_template=template)


def says(model: ServedModel, *texts: str) -> None:
    """Set the answers of a chat, one after the other, with what the template writes after START."""
    scripts = [torch.tensor([*(text + END).encode()]) for text in texts]
    model.plain.script = nn.utils.rnn.pad_sequence(scripts, batch_first=True, padding_value=ord(END))


PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "places": {"type": "array", "items": {"type": "number"}},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tell it.", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ASK = [{"role": "user", "content": "Rain in Zürich?"}]


SMALL = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "size": {"$ref": "#/$defs/size"},
        "tame": {"type": "boolean"},
    },
    "required": ["kind", "ages", "size"],
    "additionalProperties": False,
    "$defs": {"size": {"type": "integer", "minimum": 5, "maximum": 7}},
}
PET = {"type": "function", "function": {"name": "pet", "parameters": SMALL}}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
STOP = {"type": "function", "function": {"name": "stop", "parameters": NOTHING}}


def as_json(name: str, **arguments) -> str:
    call = f'{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}'
    return f"<tool_call>\n{call}\n</tool_call>"


def as_xml(name: str, **arguments) -> str:
    values = {key: one if isinstance(one, str) else json.dumps(one) for key, one in arguments.items()}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


WRITTEN = {"json": as_json, "xml": as_xml}


def calls_of(message: dict) -> list[tuple[str, dict]]:
    calls = message["tool_calls"] or []
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
