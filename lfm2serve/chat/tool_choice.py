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
    reply must call one (None: it needn't call any). parallel: whether it may hold several calls. strict: whether their
    arguments must follow the schemas."""

    offered: list[dict[str, Any]] | None = None
    required: list[dict[str, Any]] | None = None
    parallel: bool = True
    strict: bool = False


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
    strict = any(function_of(tool).get("strict") for tool in offered)
    return ToolUse(offered, required, parallel is not False, strict)


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool's function: in OpenAI's shape it's wrapped, in LFM2's documents it isn't."""
    function = tool.get("function")
    return function if isinstance(function, Mapping) else tool


def name_of(tool: Mapping[str, Any]) -> str:
    """The name of a checked tool."""
    name: str = function_of(tool)["name"]
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
        wrapped = "name" not in tool
        if tool.get("type", None if wrapped else "function") != "function":
            _refuse(f"{at}.type", f"{tool.get('type')!r:.80} is not supported; use 'function'")
        if wrapped and not isinstance(tool.get("function"), Mapping):
            _refuse(f"{at}.function", "should be an object")
        function, at = function_of(tool), f"{at}.function" if wrapped else at
        name = function.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
            _refuse(f"{at}.name", f"should be a string of 1 to {LONGEST_NAME} characters")
        if name in names:
            _refuse(f"{at}.name", f"{name!r} comes twice")
        if not isinstance(function.get("strict"), bool | None):
            _refuse(f"{at}.strict", "should be a boolean")
        if not isinstance(function.get("parameters") or {}, Mapping):
            _refuse(f"{at}.parameters", "should be a JSON schema, an object")
        names.add(name)
    return [dict(tool) for tool in tools]


def check_tool_choice(choice: Any) -> Any:
    """The choice as it is. InvalidRequest: it can't be one."""
    _choice(choice)
    return choice


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
