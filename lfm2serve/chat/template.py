"""The checkpoint's chat template: messages to prompt text, and to ids whose control tokens are the template's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lfm2serve.chat.messages import normalise, written_out
from lfm2serve.chat.prompt import ChatPrompt, find_places
from lfm2serve.chat.shield import Shield, map_strings
from lfm2serve.chat.tokenizer import Tokenizer, read_json, token_name
from lfm2serve.errors import CheckpointError, InvalidRequest

GIVEN = ("messages", "tools", "add_generation_prompt", "strftime_now")
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
OPENING_TOKENS = 16  # in which "<think>" and blanks behind it fit, one token a byte
PROBED = datetime(2000, 1, 1)  # when a template is asked what it renders
# What a model writes itself: in assistant messages these are the tokens that they were, anywhere else they are text.
SPOKEN_TOKENS = ("<think>", "</think>", "<|tool_call_start|>", "<|tool_call_end|>")


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; here its body renders as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson  # jinja2's own sorts keys and escapes for HTML
    environment.globals["raise_exception"] = _raise_exception
    return environment


class ChatTemplate:
    """A compiled chat template. `switches`: names of the further variables that it looks at. `knows_thoughts`: whether
    its model may think."""

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        *,
        file: str = "chat template",
        tool_source: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """tool_source: another template for requests with tools. special_tokens: name -> text. now: clock of dates."""
        self._tokenizer = tokenizer
        self._special = dict(special_tokens or {})
        if "bos_token" not in self._special and tokenizer.bos_token_id is not None:
            self._special["bos_token"] = tokenizer.token_text(tokenizer.bos_token_id)
        self._now = now
        environment = _environment()
        sources = [source] if tool_source is None else [source, tool_source]
        self._leaves_out: dict[bool, tuple[bool, bool]] = {}
        try:
            self._template, *self._tool_template = [environment.from_string(text) for text in sources]
            self.switches = frozenset().union(*(_switches(environment.parse(text)) for text in sources))
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{file}: line {error.lineno}: {error.message}") from error
        self._written = "".join(sources)
        self.knows_thoughts = "think>" in self._written

    @classmethod
    def from_dir(cls, path: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template of a checkpoint directory: chat_template.jinja, else tokenizer_config.json's; None: neither."""
        config_file, template_file = path / "tokenizer_config.json", path / "chat_template.jinja"
        config = read_json(config_file)
        special = {name: text for name in SPECIAL_TOKENS if (text := token_name(config.get(name))) is not None}
        if template_file.is_file():
            try:
                source = template_file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{template_file}: not readable: {error}") from error
            return cls(source, tokenizer, file=str(template_file), special_tokens=special)
        field = config.get("chat_template")
        if field is None:
            return None
        file = f"{config_file}: chat_template"
        named = {"default": field} if isinstance(field, str) else _named_templates(field, file)
        if "default" not in named:
            raise CheckpointError(f"{file}: none is named 'default'")
        tool_source = named.get("tool_use")
        return cls(named["default"], tokenizer, file=file, tool_source=tool_source, special_tokens=special)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **switches: Any,
    ) -> str:
        """The prompt's text. Control strings of users look like the template's own in it: tokenise with `encode`."""
        values = self._values(messages, tools, add_generation_prompt, switches)
        return self._render(values, self._now())

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **switches: Any,
    ) -> list[int]:
        """The prompt's ids.

        Control strings in messages, tools and switches are ordinary text, whatever they are joined with; only in
        assistant messages are thoughts and tool calls the tokens that the model wrote. Without control strings in
        them the ids are those of the rendered text. InvalidRequest: messages or tools that can't be rendered.
        """
        values = self._values(messages, tools, add_generation_prompt, switches)
        with _depth_checked():
            return self._encode(values, self._now())[0]

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **switches: Any,
    ) -> ChatPrompt:
        """The ids that `encode` gives, and the places in them that later prompts share (none with a tokeniser whose
        control tokens take blanks from beside them)."""
        values = self._values(messages, tools, add_generation_prompt, switches)
        now = self._now()
        with _depth_checked():
            ids, guarded, shielded = self._encode(values, now)
            if not self._tokenizer.controls_stand_alone:
                return ChatPrompt(ids)
            return find_places(self._tokenizer, ids, shielded, guarded, lambda changed: self._render(changed, now))

    def opens_thought(self, ids: Sequence[int]) -> bool:
        """Whether a prompt that ends with the template's own words ends inside a thought."""
        tail = self._tokenizer.decode(ids[-OPENING_TOKENS:], skip_special_tokens=False)
        return tail.rstrip().endswith("<think>")

    def _encode(self, values: Mapping[str, Any], now: datetime) -> tuple[list[int], Mapping[str, Any], str]:
        """Ids, and the values and text from which they come, guarded: its control strings are the template's own."""
        text = self._render(values, now)
        shield = Shield(self._tokenizer, SPOKEN_TOKENS, _strings(values), self._written)
        if not shield.needed:
            return shield.encode(text, text), values, text
        guarded = _guarded(values, shield.every)
        shielded = self._render(guarded, now)
        if shield.lower(shielded) != text:
            controls = shield.controls(shielded)  # this template looks at the letters, but these tokens are its own
            guarded = _guarded(values, shield.whole)
            shielded = self._render(guarded, now)
            if shield.lower(shielded) != text or shield.controls(shielded) != controls:
                raise InvalidRequest(
                    "messages hold control strings (such as <|im_end|>) that this chat template changes; "
                    "leave them out",
                    param="messages",
                )
        return shield.encode(text, shielded), guarded, shielded

    def _values(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        switches: Mapping[str, Any],
    ) -> dict[str, Any]:
        for name in switches:
            if name in (*GIVEN, *SPECIAL_TOKENS, "raise_exception"):
                raise InvalidRequest(f"{name} belongs to the chat template and can't be set", param=name)
        given: Any = tools or []
        if not isinstance(given, list | tuple) or not all(isinstance(tool, Mapping) for tool in given):
            raise InvalidRequest("tools must be a list of objects", param="tools")
        normal = normalise(messages)
        if any("tool_calls" in message or "thinking" in message for message in normal):
            calls, thoughts = self._left_out(bool(given))
            normal = [written_out(message, calls, thoughts) for message in normal]
        return {
            **switches,
            "messages": normal,
            "tools": list(given) or None,
            "add_generation_prompt": add_generation_prompt,
        }

    def _left_out(self, tools: bool) -> tuple[bool, bool]:
        """Whether the template leaves out tool calls, and thoughts although it knows them in a content."""
        known = self._leaves_out.get(tools)
        if known is None:
            call = {"type": "function", "function": {"name": "probe_call", "arguments": {}}, "id": "probe_call_1"}
            message = {"role": "assistant", "content": "", "tool_calls": [call], "thinking": "probe_thought"}
            offered = [{"type": "function", "function": {"name": "other", "parameters": {}}}] if tools else None
            messages = [{"role": "user", "content": "probe"}, message]
            try:
                text = self._render({"messages": messages, "tools": offered, "add_generation_prompt": False}, PROBED)
            except InvalidRequest:
                text = "probe_call probe_thought"  # it looks at them, at any rate
            known = "probe_call" not in text, "probe_thought" not in text and self.knows_thoughts
            self._leaves_out[tools] = known
        return known

    def _render(self, values: Mapping[str, Any], now: datetime) -> str:
        template = self._tool_template[0] if values["tools"] and self._tool_template else self._template
        try:
            return template.render({**self._special, "strftime_now": now.strftime, **values})
        except Exception as error:  # a template is a program of the checkpoint's: it may raise anything
            problem = " ".join(str(error).split()) or type(error).__name__
            raise InvalidRequest(f"the chat template can't render this: {problem}", param="messages") from error


@contextmanager
def _depth_checked() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise InvalidRequest("messages or tools are nested too deeply", param="messages") from None


def _switches(program: nodes.Template) -> set[str]:
    """Variables that a template reads and doesn't make itself (one that it gives a default isn't its own)."""
    made = {name.name for name in program.find_all(nodes.Name) if name.ctx == "store"}
    asked = {"default", "d", "defined", "undefined"}
    questions = program.find_all((nodes.Filter, nodes.Test))
    optional = {q.node.name for q in questions if q.name in asked and isinstance(q.node, nodes.Name)}
    return meta.find_undeclared_variables(program) - (made - optional) - {*GIVEN, *SPECIAL_TOKENS}


def _named_templates(field: Any, file: str) -> dict[str, str]:
    try:
        named = {entry["name"]: entry["template"] for entry in field}
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{file}: must be a string or a list of name and template") from error
    if not all(isinstance(text, str) for text in named.values()):
        raise CheckpointError(f"{file}: a template isn't a string")
    return named


def _guarded(values: Mapping[str, Any], guard: Callable[[str, bool], str]) -> dict[str, Any]:
    """The values with every user's string guarded; guard(text, spoken) where spoken means written by the model."""
    guarded = {name: map_strings(value, lambda text: guard(text, False)) for name, value in values.items()}
    guarded["messages"] = [_guarded_message(message, guard) for message in values["messages"]]
    return guarded


def _guarded_message(message: Mapping[str, Any], guard: Callable[[str, bool], str]) -> dict[str, Any]:
    said = ("content", "thinking") if message["role"] == "assistant" else ()
    guarded = {key: map_strings(value, lambda text: guard(text, False)) for key, value in message.items()}
    return {**guarded, "role": message["role"], **{key: guard(message[key], True) for key in said if key in message}}


def _strings(value: Any) -> list[str]:
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    map_strings(value, note)
    return found
