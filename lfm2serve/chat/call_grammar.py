"""Grammars of tool calls in llguidance's Lark dialect: what a request's tools allow, as the model writes it.

A tool whose parameters are plain properties is called as `name(key=value, ...)`, in the properties' order, each value
as its schema wants it; any other as {"name": ..., "arguments": ...}, which the parser reads too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lfm2serve.chat.tool_choice import function_of, name_of

BLANKS = r"( |\n[ \t]{0,24})"  # between JSON's tokens: enough to indent, too little to go on with forever
DEFINITIONS = ("$defs", "definitions")
_PLAIN_SCHEMA = frozenset(
    ("type", "properties", "required", "additionalProperties", "title", "description", "$schema", "$id", *DEFINITIONS)
)
_KEY = re.compile(r"[^\s()\[\]{},=:'\"]+")
_NAME = re.compile(r"[^\W\d][\w.-]*")


def with_options(schema: Any, **options: Any) -> str:
    """A schema as text, with how its JSON is written."""
    if not isinstance(schema, Mapping):
        return json.dumps(schema)
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": BLANKS, **options}})


def calls_rules(tools: Sequence[Mapping[str, Any]], parallel: bool, start: str, end: str) -> str:
    """Rules of which `calls` is a block of calls of these tools. start, end: its two tokens in Lark."""
    more = r" (/, ?/ call)*" if parallel else ""
    lines = [
        f'calls: {start} "[" call{more} "]" {end}',
        "call: " + " | ".join(f"call_{index}" for index in range(len(tools))),
    ]
    for index, tool in enumerate(tools):
        schema = function_of(tool).get("parameters") or {}
        lines += _call(f"call_{index}", name_of(tool), schema)
    return "\n".join(lines)


def _call(rule: str, name: str, schema: Mapping[str, Any]) -> list[str]:
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    plain = (
        _NAME.fullmatch(name) is not None
        and schema.keys() <= _PLAIN_SCHEMA
        and not schema.get("additionalProperties")
        and isinstance(properties, Mapping)
        and all(_KEY.fullmatch(key) for key in properties)
        and isinstance(required, list)
        and set(required) <= properties.keys()
    )
    if not plain:
        return [f"{rule}: %json {_whole_call(name, schema)}"]
    parts = [(key, key in required, f"{rule}_value_{at}") for at, key in enumerate(properties)]
    lines = [f"{value}: {_value(properties[key], schema)}" for key, _, value in parts]
    first: list[str] = []  # what may come first: each argument before which no other is required
    rest = ""
    for at in range(len(parts) - 1, -1, -1):
        key, needed, value = parts[at]
        lines.append(f"{rule}_from_{at}: {_text(key + '=')} {value}{rest}")
        first = [f"{rule}_from_{at}", *([] if needed else first)]
        lines.append(f"{rule}_rest_{at}: {_optional(f'/, ?/ {rule}_from_{at}', needed, rest)}")
        rest = f" {rule}_rest_{at}"
    none_needed = not any(needed for _, needed, _ in parts)
    arguments = f" ({' | '.join(first)}){'?' if none_needed else ''}" if first else ""
    return [f'{rule}: {_text(name + "(")}{arguments} ")"', *lines]


def _optional(argument: str, needed: bool, rest: str) -> str:
    """An argument behind others, or what comes after it."""
    if needed:
        return argument
    return f"{argument} |{rest}" if rest else f'{argument} | ""'


def _value(schema: Any, root: Mapping[str, Any]) -> str:
    if (
        isinstance(schema, Mapping)
        and schema.get("type") == "boolean"
        and "enum" not in schema
        and "const" not in schema
    ):
        return "/[Tt]rue|[Ff]alse/"
    if isinstance(schema, Mapping) and schema.get("type") == "null":
        return "/None|null/"
    if isinstance(schema, Mapping):
        schema = {**schema, **{key: root[key] for key in DEFINITIONS if key in root}}
    return f"%json {with_options(schema)}"


def _whole_call(name: str, schema: Mapping[str, Any]) -> str:
    arguments = {key: value for key, value in schema.items() if key not in DEFINITIONS}
    arguments.setdefault("type", "object")
    call = {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        **{key: schema[key] for key in DEFINITIONS if key in schema},
    }
    return with_options(call)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
