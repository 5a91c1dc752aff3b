"""The bodies of chats: messages, tools, and calls of tools."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator

from recurra.serve._bodies import Body, JsonObject, MaxTokens, OpenAIBody, Text
from recurra.serve._http import refusal
from recurra.serve._model import ServedModel
from recurra.serve._tools import AnswerForm, Tool

_FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class _TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: Text


_Content = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[_TextPart], Tag("<parts>")],
    Discriminator(lambda content: "<parts>" if isinstance(content, list) else "<text>"),
    AfterValidator(lambda content: content if isinstance(content, str) else "\n".join(part.text for part in content)),
]


class _Message(Body):
    """A message of a chat. Parts of its content become lines of one text."""

    role: Literal["system", "developer", "user"]
    content: _Content
    name: str | None = Field(None, max_length=1000)


class _CalledFunction(Body):
    """The function of a call. Templates expect its arguments as an object; clients send them as JSON."""

    name: _FunctionName
    arguments: JsonObject | Text

    @field_validator("arguments", mode="before")
    @classmethod
    def _parse(cls, arguments: Any) -> Any:
        found = arguments
        if isinstance(arguments, str):
            try:
                found = json.loads(arguments or "{}")
                json.dumps(found, ensure_ascii=False).encode()
            except (ValueError, RecursionError):
                return arguments  # as the model wrote them, for it to see its mistake
        if not isinstance(found, dict):
            raise ValueError("not a JSON object; expected one, or its JSON as text")
        return found


class _ToolCall(Body):
    """A call that the model made."""

    id: str = Field("", max_length=1000)
    type: Literal["function"] = "function"
    function: _CalledFunction
    index: int = Field(0, exclude=True, description="no meaning here; streams have it")


class _AnswerMessage(_Message):
    """An answer of the model."""

    role: Literal["assistant"]  # type: ignore[assignment]


class _AnswerInParts(_AnswerMessage):
    """An answer with reasoning or calls of tools, which may have no text."""

    content: _Content = ""
    reasoning_content: Text | None = None
    tool_calls: list[_ToolCall] | None = Field(None, max_length=1000)


class _ToolMessage(_Message):
    """What a tool returned."""

    role: Literal["tool"]  # type: ignore[assignment]
    tool_call_id: str = Field(max_length=1000)


def _kind_of_message(message: Any) -> str:
    message = message if isinstance(message, dict) else {}
    if message.get("tool_calls") or message.get("reasoning_content"):
        return "<parts>"
    return {"assistant": "<answer>", "tool": "<result>"}.get(str(message.get("role")), "<message>")


_Messages = Annotated[
    list[
        Annotated[
            Annotated[_Message, Tag("<message>")]
            | Annotated[_AnswerMessage, Tag("<answer>")]
            | Annotated[_AnswerInParts, Tag("<parts>")]
            | Annotated[_ToolMessage, Tag("<result>")],
            Discriminator(_kind_of_message),
        ]
    ],
    Field(min_length=1, max_length=1000),
]


class _Function(Body):
    """A function that the model may call."""

    name: _FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = Field(None, description="whether the arguments must fulfil the schema of the parameters")


class _ToolDefinition(Body):
    """A tool."""

    type: Literal["function"]
    function: _Function


class _FunctionOfChoice(Body):
    name: _FunctionName


class _NamedChoice(Body):
    """The one function to call."""

    type: Literal["function"]
    function: _FunctionOfChoice


_ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")] | Annotated[_NamedChoice, Tag("<function>")],
    Discriminator(lambda choice: "<word>" if isinstance(choice, str) else "<function>"),
]


class _TemplateBody(Body):
    """What a chat template reads beside the messages."""

    tools: list[_ToolDefinition] | None = Field(None, max_length=1000)
    chat_template_kwargs: JsonObject = Field({}, max_length=100)

    def chat_text(self, model: ServedModel, messages: list[Any]) -> str:
        """Return the text of the chat up to the answer. Raises ApiError if the template refuses it."""
        dumped = [message.model_dump(exclude_none=True) for message in messages]
        tools = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in self.shown_tools]
        return model.chat_text(dumped, tools, self.chat_template_kwargs)

    @property
    def shown_tools(self) -> list[_ToolDefinition]:
        """The tools that the model is told of."""
        return self.tools or []


class ChatBody(_TemplateBody, OpenAIBody):
    """Continue a chat."""

    messages: _Messages
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tool_choice: _ToolChoice = "auto"
    parallel_tool_calls: bool = True

    @property
    def shown_tools(self) -> list[_ToolDefinition]:
        """The tools that the model is told of: none if it must not call any."""
        return [] if self.tool_choice == "none" else super().shown_tools

    def form(self, model: ServedModel, prompt: str) -> AnswerForm:
        """Return the form of the answer to the chat's text. Raises ApiError if the choice of tools makes no sense."""
        functions = [tool.function for tool in self.shown_tools]
        tools = [Tool(one.name, one.parameters or _NO_PARAMETERS, bool(one.strict)) for one in functions]
        names, choice = [tool.name for tool in tools], self.tool_choice
        if len(set(names)) < len(names):
            raise refusal("tools", f"two functions named {max(names, key=names.count)!r}", "different names")
        named = choice.function.name if isinstance(choice, _NamedChoice) else None
        if named not in (None, *names):
            raise refusal("tool_choice", f"the function {named!r}", "one of tools")
        if choice == "required" and not tools:
            raise refusal("tool_choice", "'required', without tools", "tools beside it")
        syntax = model.chat_format.calls if tools else None
        is_forced = named is not None or choice == "required"
        tools = [tool for tool in tools if named in (None, tool.name)]
        several = self.parallel_tool_calls and named is None
        if is_forced and not model.chat_ends:  # after which call would it end?
            several = False
        return AnswerForm(model.chat_format.reasoning(prompt), syntax, tools, is_forced, several)


class TokenizeBody(_TemplateBody):
    """Turn a text, or a chat, into tokens."""

    model: str | None = Field(None, max_length=200, description="which model; the first one served by default")
    prompt: Text | None = None
    messages: _Messages | None = None
    add_special_tokens: bool = Field(True, description="with the tokens that the model's texts begin with")
