"""The tools of a Responses request: what the model is told of them, and what its calls are for the client."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from lfm2serve.server.dialects.fields import Hint, Name, refuse
from lfm2serve.server.requests import Strict

log = logging.getLogger(__name__)

CUSTOM_INPUT = "input"  # the one argument of a custom tool, as the model sees it
FREE_TEXT = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}


class FunctionTool(Strict):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Hint = None
    allowed_callers: Hint = None
    defer_loading: Hint = None
    output_schema: Hint = None


class CustomTool(Strict):
    """A tool that takes free text. A grammar for it is told to the model, not enforced."""

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: dict[str, Any] | None = None
    allowed_callers: Hint = None
    defer_loading: Hint = None


OwnTool = FunctionTool | CustomTool


class NamespaceTool(Strict):
    type: Literal["namespace"]
    name: Name
    description: Hint = None
    tools: list[Annotated[OwnTool, Field(discriminator="type")]]


class HostedTool(BaseModel):
    """A tool that agents offer wherever they are; the model isn't told of it, since nobody runs it here."""

    model_config = ConfigDict(extra="allow")

    type: Literal["web_search", "web_search_preview", "image_generation", "local_shell", "tool_search"]


ToolItem = Annotated[FunctionTool | CustomTool | NamespaceTool | HostedTool, Field(discriminator="type")]


class Mode(Strict):
    type: Literal["none", "auto", "required"]


class NamedTool(Strict):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


def _mode(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


def _or_mode(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [{"enum": ["none", "auto", "required"]}, {"oneOf": schema.pop("oneOf")}]
    schema.pop("discriminator", None)


ToolChoice = Annotated[
    Mode | NamedTool | AllowedTools,
    Field(discriminator="type", json_schema_extra=_or_mode),
    BeforeValidator(_mode),
]


@dataclass(frozen=True, slots=True)
class CallName:
    """What a client calls a tool. custom: it takes free text."""

    name: str
    namespace: str | None = None
    custom: bool = False


def full_name(name: str, namespace: str | None) -> str:
    """What the model calls a tool."""
    return f"{namespace}.{name}" if namespace else name


class ToolBox:
    """told: the tools as a chat has them, by the names that the model gives them. shown: as the response has them."""

    def __init__(self, tools: Sequence[ToolItem]) -> None:
        """InvalidRequest: two tools with one name."""
        self.told: dict[str, dict[str, Any]] = {}
        self.shown: list[dict[str, Any]] = []
        self._names: dict[str, CallName] = {}
        for index, tool in enumerate(tools):
            at = f"tools[{index}]"
            if isinstance(tool, HostedTool):
                log.debug("%s: nobody runs %s here; the model isn't told of it", at, tool.type)
                continue
            self.shown.append(tool.model_dump(exclude_none=True))
            if isinstance(tool, NamespaceTool):
                for place, inner in enumerate(tool.tools):
                    self._add(inner, tool.name, f"{at}.tools[{place}]")
            else:
                self._add(tool, None, at)

    def called(self, name: str) -> CallName:
        """What the client calls a tool that the model called."""
        return self._names.get(name, CallName(name))

    def chat_fields(self, choice: Mode | NamedTool | AllowedTools) -> dict[str, Any]:
        """The chat's `tools` and `tool_choice`. InvalidRequest: a choice that isn't among the tools."""
        told, wanted = self.told, choice.type
        if isinstance(choice, NamedTool):
            name = self._known(choice.name, choice.namespace, "tool_choice.name")
            return {"tools": list(told.values()), "tool_choice": {"type": "function", "function": {"name": name}}}
        if isinstance(choice, AllowedTools):
            wanted = choice.mode
            told = {}
            for index, tool in enumerate(choice.tools):
                name = self._known(tool.get("name"), tool.get("namespace"), f"tool_choice.tools[{index}].name")
                told[name] = self.told[name]
        return {"tools": list(told.values()) or None, "tool_choice": wanted if told or wanted == "required" else None}

    def _known(self, name: Any, namespace: Any, at: str) -> str:
        if isinstance(name, str) and isinstance(namespace, str | None) and full_name(name, namespace) in self.told:
            return full_name(name, namespace)
        raise refuse(at, "is not one of the tools")

    def _add(self, tool: OwnTool, namespace: str | None, at: str) -> None:
        name = full_name(tool.name, namespace)
        if name in self.told:
            raise refuse(f"{at}.name", f"{name!r} is there twice")
        custom = isinstance(tool, CustomTool)
        self._names[name] = CallName(tool.name, namespace, custom)
        if isinstance(tool, CustomTool):
            function = {"name": name, "description": _told_of(tool), "parameters": FREE_TEXT}
        else:
            function = {"name": name, "description": tool.description, "parameters": tool.parameters}
        self.told[name] = {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _told_of(tool: CustomTool) -> str | None:
    grammar = tool.format or {}
    if grammar.get("type") != "grammar":
        return tool.description
    told = f"The input follows this {grammar.get('syntax', '')} grammar:\n{grammar.get('definition', '')}"
    return f"{tool.description}\n{told}" if tool.description else told
