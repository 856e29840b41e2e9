"""Which tools a request offers, and whether the reply must use them: `tools` and `tool_choice` in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from lfm2serve.errors import InvalidRequest

CHOICES = ("none", "auto", "required")
LONGEST_NAME = 256


@dataclass(frozen=True, slots=True)
class ToolUse:
    """offered: the tools of the prompt (None: none, and nothing is read as a call). required: the tools of which the
    reply must call one (None: it needn't call any). parallel: whether it may hold several calls."""

    offered: list[dict[str, Any]] | None = None
    required: list[dict[str, Any]] | None = None
    parallel: bool = True


def tool_use(tools: Any, choice: Any = None, parallel: bool | None = None) -> ToolUse:
    """The checked fields of a request. choice: None (auto where there are tools), "none", "auto", "required", or one
    function's name as {"type": "function", "function": {"name": ...}}. InvalidRequest names the place."""
    offered = _tools(tools)
    mode, name = _choice(choice)
    if mode == "none" or not offered:
        if mode in ("required", "named"):
            _refuse("tool_choice", "needs tools to choose from")
        return ToolUse()
    required = offered if mode == "required" else None
    if name is not None:
        required = [tool for tool in offered if name_of(tool) == name]
        if not required:
            _refuse("tool_choice.function.name", f"{name!r:.80} is none of the tools")
    return ToolUse(offered, required, parallel is not False)


def name_of(tool: Mapping[str, Any]) -> str:
    """The name of a checked tool."""
    name: str = tool["function"]["name"]
    return name


def _tools(tools: Any) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        _refuse("tools", "should be a list")
    names = set()
    for index, tool in enumerate(tools):
        at = f"tools[{index}]"
        if not isinstance(tool, Mapping):
            _refuse(at, "should be an object")
        if tool.get("type") != "function":
            _refuse(f"{at}.type", f"{tool.get('type')!r:.80} is not supported; use 'function'")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            _refuse(f"{at}.function", "should be an object")
        name = function.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
            _refuse(f"{at}.function.name", f"should be a string of 1 to {LONGEST_NAME} characters")
        if name in names:
            _refuse(f"{at}.function.name", f"{name!r} comes twice")
        if not isinstance(function.get("parameters") or {}, Mapping):
            _refuse(f"{at}.function.parameters", "should be a JSON schema, an object")
        names.add(name)
    return [dict(tool) for tool in tools]


def _choice(choice: Any) -> tuple[str, str | None]:
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice not in CHOICES:
            _refuse("tool_choice", f"{choice!r:.80} is not supported; use {', '.join(CHOICES)} or a function")
        return choice, None
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        _refuse("tool_choice", f"should be {', '.join(CHOICES)} or an object of type 'function'")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        _refuse("tool_choice.function.name", "should be a string")
    return "named", name


def _refuse(at: str, problem: str) -> NoReturn:
    raise InvalidRequest(f"{at}: {problem}", param=at)
