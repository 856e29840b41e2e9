"""Tool calls as LFM2 writes them, `[name(a="x", n=1), other()]` or JSON: read by Python's `ast`, never run.

Models write almost-Python: JSON's literals, `07`, raw line breaks in strings, names that are keywords or have a hyphen.
Strings and names are therefore set aside before the rest is given to the parser.
"""

from __future__ import annotations

import ast
import json
import keyword
import logging
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from lfm2serve.chat.tool_choice import function_of

log = logging.getLogger(__name__)

Tools = Sequence[Mapping[str, Any]]

# A string ends at its own quote; three quotes always open a long one.
_STRING = (
    r'(?>"""(?>\\.|(?!""").)*"""|\'\'\'(?>\\.|(?!\'\'\').)*\'\'\''
    r'|"(?!"")(?>\\.|[^"\\])*"|\'(?!\'\')(?>\\.|[^\'\\])*\')'
)
_ESCAPED_QUOTE = r"\\['\"]"  # begins no string
_STRINGS = re.compile(rf"{_ESCAPED_QUOTE}|({_STRING})", re.DOTALL)
_OUTSIDE = r"(?>{escaped}|{string}|[^'\"{end}])*{end}"
_ESCAPES = re.compile(r"\\(.)|([\x00-\x1f])", re.DOTALL)
_KNOWN_ESCAPES = frozenset("\n\\'\"abfnrtv01234567xNuU")
_ARGUMENT = re.compile(r"(?<=[(,])(\s*)([^\s()\[\]{},=:'\"]+)(?=\s*=(?!=))")
_ZEROS = re.compile(r"(?<![\w.])0+(?=\d)")
_CONSTANTS = {"true": True, "false": False, "null": None}
_CALLEE = r"(?<![\w.-])[^\W\d][\w.-]*"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a reply. arguments: a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What a call gained. id and name come with a call's first delta only; arguments is a piece of JSON text."""

    index: int
    id: str | None
    name: str | None
    arguments: str


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def end_pattern(end: str) -> re.Pattern[str]:
    """Matches from the start of a block up to the first `end` (one character) that is in none of its strings."""
    return re.compile(_OUTSIDE.format(escaped=_ESCAPED_QUOTE, string=_STRING, end=re.escape(end)), re.DOTALL)


class _Refused(Exception):
    """Why a call isn't one."""


def parse_calls(body: str, tools: Tools = ()) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON) of every call in a block; None: the block is no list of calls.

    One call that isn't made of literals is left out where others are good. Positional arguments take the names of the
    tool's properties, in their order.
    """
    properties = {function["name"]: _properties(function) for function in map(function_of, tools) if "name" in function}
    try:
        read = _from_json(body) or _from_python(body, properties)
    except (_Refused, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        log.info("a tool call block can't be read: %s", type(error).__name__)
        return None
    calls = []
    for one in read:
        try:
            name, arguments = _call(one, properties) if isinstance(one, ast.Call) else _named(one)
            calls.append((name, _whole_text(json.dumps(arguments, ensure_ascii=False, allow_nan=False))))
        except (_Refused, ValueError, RecursionError) as error:
            log.info("a tool call is left out: %s", error if isinstance(error, _Refused) else type(error).__name__)
    return calls if calls or not read else None


def _from_json(body: str) -> list[Any] | None:
    """The items of a block that is JSON."""
    if not re.match(r"\s*(\[\s*)?\{", body):
        return None
    try:
        value = json.loads(body, strict=False, parse_constant=_no_constant)
    except ValueError:
        return None  # it may be a Python dict
    return value if isinstance(value, list) else [value]


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _named(value: Any) -> tuple[str, dict[str, Any]]:
    """A call that is written as an object with a name and arguments."""
    if isinstance(value, ast.expr):
        value = _literal(value)
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise _Refused("an object without a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}", strict=False, parse_constant=_no_constant)
    if not isinstance(arguments, dict):
        raise _Refused("its arguments are no object")
    return value["name"], arguments


def _from_python(body: str, properties: Mapping[str, list[str]]) -> list[ast.expr]:
    """The items of a block that is Python: calls with their names in place, and objects."""
    names: list[str] = []
    tree = ast.parse(_plain_python(body, properties, names), mode="eval").body
    if not isinstance(tree, ast.List | ast.Dict):
        raise _Refused("not a list")
    found: list[ast.expr] = tree.elts if isinstance(tree, ast.List) else [tree]
    for node in found:
        if isinstance(node, ast.Dict):
            continue
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.func.id.startswith("_c"):
            raise _Refused("not a call")
        node.func.id = names[int(node.func.id[2:])]
        for argument in node.keywords:
            if argument.arg is not None:
                argument.arg = names[int(argument.arg[2:])]
    return found


def _plain_python(body: str, known: Mapping[str, Any], names: list[str]) -> str:
    """The block as Python that parses: names are numbered, strings have no raw control characters."""
    listed = [re.escape(name) for name in sorted(known, key=len, reverse=True)]
    callee = re.compile("(?:" + "|".join([*(rf"(?<![\w.-]){name}" for name in listed), _CALLEE]) + r")(?=\s*\()")

    def number(name: str, kind: str) -> str:
        names.append(name)
        return f"_{kind}{len(names) - 1}"

    def code(text: str) -> str:
        text = _ARGUMENT.sub(lambda match: match[1] + number(match[2], "k"), text)
        text = callee.sub(lambda match: number(match[0], "c"), text)
        return re.sub(r"\s+", " ", _ZEROS.sub("", text))

    pieces, at = [], 0
    for match in _STRINGS.finditer(body):
        if match[1] is None:
            raise _Refused("a quote outside of a string is escaped")
        pieces += [code(body[at : match.start()]), _string(match[0])]
        at = match.end()
    return "".join([*pieces, code(body[at:])]).strip()


def _string(literal: str) -> str:
    """A string literal without raw control characters and without escapes that Python doesn't know."""

    def replace(match: re.Match[str]) -> str:
        if match[2] is not None:
            return f"\\x{ord(match[2]):02x}"
        return match[0] if match[1] in _KNOWN_ESCAPES else "\\" + match[0]

    return _ESCAPES.sub(replace, literal)


def _call(node: ast.Call, properties: Mapping[str, list[str]]) -> tuple[str, dict[str, Any]]:
    assert isinstance(node.func, ast.Name)
    name = node.func.id
    arguments: dict[str, Any] = {}
    if len(node.args) > len(properties.get(name, ())):
        raise _Refused(f"{name}: {len(node.args)} positional arguments")
    pairs: list[tuple[Any, Any]] = list(zip(properties.get(name, ()), map(_literal, node.args), strict=False))
    for argument in node.keywords:
        value = _literal(argument.value)
        if argument.arg is None:
            if not isinstance(value, dict):
                raise _Refused(f"{name}: ** of no object")
            pairs += value.items()
        else:
            pairs.append((argument.arg, value))
    for key, value in pairs:
        if key in arguments:
            raise _Refused(f"{name}: an argument comes twice")
        arguments[key] = value
    return name, arguments


def _literal(node: ast.expr) -> Any:
    """The value of a literal; anything else is refused."""
    match node:
        case ast.Constant(value=str() | bool() | int() | None as value):
            return value
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant()):
            value = _literal(node.operand)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise _Refused("a sign before no number")
            return -value if isinstance(sign, ast.USub) else value
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
    raise _Refused(f"{type(node).__name__} is no literal")


def _key(node: ast.expr | None) -> str:
    key = None if node is None else _literal(node)
    if node is None or isinstance(key, list | dict):
        raise _Refused("a key that is no text")
    return key if isinstance(key, str) else json.dumps(key)


def _whole_text(text: str) -> str:
    """Text without lone halves of surrogate pairs; pairs that were written as two escapes become one character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _properties(function: Mapping[str, Any]) -> list[str]:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return list(properties) if isinstance(properties, Mapping) else []


def write_calls(calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls of a normalised message as the model writes them, for templates that don't."""
    return "[" + ", ".join(_written(call["function"]) for call in calls) + "]"


def _written(function: Mapping[str, Any]) -> str:
    arguments: Mapping[str, Any] = function["arguments"]
    if all(key.isidentifier() and not keyword.iskeyword(key) for key in arguments):
        return f"{function['name']}({', '.join(f'{key}={_python(value)}' for key, value in arguments.items())})"
    return f"{function['name']}(**{_python(arguments)})"


def _python(value: Any) -> str:
    """A JSON value as a Python literal, with strings as JSON writes them. What could be a control string is escaped."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_python(key)}: {_python(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_python, value)) + "]"
    if value is None or isinstance(value, bool):
        return str(value)
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(r"<(?=\||/?think>)", r"\\x3c", text)
