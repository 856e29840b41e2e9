"""The items of a Responses conversation, and the chat messages that they stand for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from lfm2serve.server.dialects.fields import Hint, Name, kind_or, list_or_text, refuse
from lfm2serve.server.dialects.response_tools import CUSTOM_INPUT, full_name
from lfm2serve.server.requests import Strict


class Text(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Hint = None
    logprobs: Hint = None
    prompt_cache_breakpoint: Hint = None


class Refusal(Strict):
    type: Literal["refusal"]
    refusal: str


Content = Annotated[
    list[Annotated[Text | Refusal, Field(discriminator="type")]],
    *list_or_text(lambda text: {"type": "input_text", "text": text}),
]


class _Item(Strict):
    id: Hint = None
    status: Hint = None


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: Hint = None


class ThoughtText(Strict):
    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(_Item):
    """A thought. What only its author can read (encrypted_content), and summaries, are left out."""

    type: Literal["reasoning"]
    content: list[ThoughtText] | None = None
    summary: Hint = None
    encrypted_content: Hint = None


class FunctionCallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str
    namespace: str | None = None
    caller: Hint = None


class CustomCallItem(_Item):
    type: Literal["custom_tool_call"]
    call_id: str
    name: Name
    input: str
    namespace: str | None = None
    caller: Hint = None


class CallOutputItem(_Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content
    name: Hint = None
    namespace: Hint = None
    caller: Hint = None


def _kind(item: dict[str, Any]) -> str:
    return "message" if "role" in item else "item_reference"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[CallOutputItem, Tag("custom_tool_call_output")],
    Discriminator(kind_or(_kind)),
]


def chat_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The messages that the items stand for; InvalidRequest names the item that has no meaning.

    What the assistant thinks, says and calls in a row is one message.
    """
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        match item:
            case MessageItem(role="assistant"):
                _say(messages, _text(item.content))
            case MessageItem():
                # templates know system messages; a developer's is one by OpenAI's definition
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": _text(item.content)})
            case ReasoningItem():
                thought = "".join(part.text for part in item.content or ())
                if thought:
                    messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
            case FunctionCallItem():
                _call(messages, item, _arguments(item.arguments, f"input[{index}].arguments"))
            case CustomCallItem():
                _call(messages, item, {CUSTOM_INPUT: item.input})
            case CallOutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
    return messages


def _text(content: Sequence[Text | Refusal]) -> str:
    return "\n".join(part.text if isinstance(part, Text) else part.refusal for part in content)


def _say(messages: list[dict[str, Any]], text: str) -> None:
    """The assistant's text: behind its thought or its calls, or a message of its own."""
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and (not last["content"] or "tool_calls" in last):
        last["content"] += text
    else:
        messages.append({"role": "assistant", "content": text})


def _call(messages: list[dict[str, Any]], item: FunctionCallItem | CustomCallItem, arguments: dict[str, Any]) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    function = {"name": full_name(item.name, item.namespace), "arguments": arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _arguments(text: str, at: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise refuse(at, f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise refuse(at, "must be a JSON object")
    return value
