"""OpenAI-shaped messages, made into what chat templates can take.

Templates differ in what breaks them (null content, arguments as a string, an empty list of tool calls ...); after
`normalise` every message has a role and a string as its content, and no key that is null or empty.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from lfm2serve.chat.tool_calls import write_calls
from lfm2serve.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool")
LABELS = ("annotations", "cache_control")  # sent along by clients; no prompt depends on them
THOUGHTS = ("thinking", "reasoning_content", "reasoning")
_KNOWN = {"role", "content", "name", "tool_call_id", "tool_calls", *THOUGHTS}


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates take them; the input stays as it is.

    Content is one string (null is "", text parts are joined, a tool's object is written as JSON), tool-call arguments
    are objects, a thought is called `thinking`. InvalidRequest names the place, as in "messages[2].content".
    """
    if not _is_list(messages):
        _refuse("messages", "must be a list of messages")
    if not messages:
        _refuse("messages", "must hold at least one message")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def written_out(message: Mapping[str, Any], calls: bool, thought: bool) -> dict[str, Any]:
    """A normalised message with its calls, or its thought, written into the content as the model writes them."""
    result = dict(message)
    if calls and (made := result.pop("tool_calls", None)):
        result["content"] = f"<|tool_call_start|>{write_calls(made)}<|tool_call_end|>{result['content']}"
    if thought and (thinking := result.pop("thinking", None)):
        result["content"] = f"<think>{thinking}</think>{result['content']}"
    return result


def _message(message: Any, at: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        _refuse(at, "must be an object with a role and a content")
    given = {key: value for key, value in message.items() if value is not None and value != [] and key not in LABELS}
    role = given.get("role")
    if role not in ROLES:
        _refuse(f"{at}.role", f"{role!r} is not a role; use {', '.join(ROLES)}" if role else "is missing")
    for key in given:
        if key not in _KNOWN:
            _refuse(f"{at}.{key}", "is not a field of a message")
        if role != "assistant" and key in ("tool_calls", *THOUGHTS):
            _refuse(f"{at}.{key}", "belongs to assistant messages only")
    result: dict[str, Any] = {"role": role, "content": _content(given.get("content", ""), role, f"{at}.content")}
    for key in ("name", "tool_call_id"):
        if key in given:
            result[key] = _text(given[key], f"{at}.{key}")
    if thought := _thought(given, at):
        result["thinking"] = thought
    if "tool_calls" in given:
        result["tool_calls"] = _tool_calls(given["tool_calls"], f"{at}.tool_calls")
    return result


def _content(content: Any, role: str, at: str) -> str:
    if isinstance(content, str):
        return content
    has_parts = _is_list(content) and all(isinstance(part, Mapping) and "type" in part for part in content)
    if role == "tool" and not has_parts:
        return _json(content, at)
    if not _is_list(content):
        _refuse(at, "must be a string, null or a list of parts")
    return "".join(_part(part, f"{at}[{index}]") for index, part in enumerate(content))


def _part(part: Any, at: str) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        _refuse(at, "must be an object with a type")
    if part["type"] != "text":
        _refuse(f"{at}.type", f"{part['type']!r} parts are not supported; this model takes text")
    for key in part:
        if key not in ("type", "text", *LABELS):
            _refuse(f"{at}.{key}", "is not a field of a text part")
    return _text(part.get("text"), f"{at}.text")


def _thought(given: Mapping[str, Any], at: str) -> str:
    """The one thought of a message, under whichever of its names it came."""
    thoughts = {key: _text(given[key], f"{at}.{key}") for key in THOUGHTS if key in given}
    if len(set(thoughts.values())) > 1:
        first, *others = thoughts
        _refuse(f"{at}.{others[-1]}", f"differs from {first}; send one of them")
    return next(iter(thoughts.values()), "")


def _tool_calls(calls: Any, at: str) -> list[dict[str, Any]]:
    if not _is_list(calls):
        _refuse(at, "must be a list of tool calls")
    return [_tool_call(call, f"{at}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, at: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        _refuse(at, "must be an object with a function")
    kind = call.get("type") or "function"
    if kind != "function":
        _refuse(f"{at}.type", f"{kind!r} is not supported; use 'function'")
    wrapped = call.get("function") is not None
    function, inner = (call["function"], f"{at}.function") if wrapped else (call, at)
    if not isinstance(function, Mapping):
        _refuse(inner, "must be an object with a name and arguments")
    name = _text(function.get("name"), f"{inner}.name")
    if not name:
        _refuse(f"{inner}.name", "is empty")
    arguments = _arguments(function.get("arguments"), f"{inner}.arguments")
    result: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id") is not None:
        result["id"] = _text(call["id"], f"{at}.id")
    return result


def _arguments(arguments: Any, at: str) -> dict[str, Any]:
    """A call's arguments as an object of its own: JSON text is parsed, none at all is {}."""
    text = arguments if isinstance(arguments, str) else _json({} if arguments is None else arguments, at)
    try:
        value = json.loads(text or "{}", parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        _refuse(at, f"is not valid JSON: {error}")
    if not isinstance(value, dict):
        _refuse(at, "must be an object, or a string that holds one as JSON")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _json(value: Any, at: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        _refuse(at, f"can't be written as JSON: {error}")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _text(value: Any, at: str) -> str:
    if not isinstance(value, str):
        _refuse(at, "must be a string")
    return value


def _refuse(at: str, problem: str) -> NoReturn:
    raise InvalidRequest(f"{at} {problem}", param=at)
