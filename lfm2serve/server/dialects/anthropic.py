"""Anthropic's requests, POST /v1/messages and /v1/messages/count_tokens, and the chats that they come down to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from lfm2serve.errors import InvalidRequest
from lfm2serve.sampling import SamplingParams
from lfm2serve.server.dialects.fields import Body, DialectChat, Hint, Name, list_or_text, refuse, thinking_fields
from lfm2serve.server.group import Prompt
from lfm2serve.server.requests import ChatRequest, Strict

ERROR_MARK = "Error: "  # before the result of a tool that failed; templates have no other place for it

TEXT_BLOCKS = list_or_text(lambda text: {"type": "text", "text": text})


class _Block(Strict):
    cache_control: Hint = None


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: Hint = None


class ThinkingBlock(_Block):
    type: Literal["thinking"]
    thinking: str
    signature: Hint = None


class RedactedThinkingBlock(_Block):
    """A thought that nobody but its author can read; it is left out."""

    type: Literal["redacted_thinking"]
    data: Hint = None


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: str
    name: Name
    input: dict[str, Any]
    caller: Hint = None
    toolset_name: Hint = None


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[TextBlock], *TEXT_BLOCKS] = Field(default_factory=list)
    is_error: bool | None = None
    toolset_name: Hint = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], *TEXT_BLOCKS]


class Tool(Strict):
    """A tool that the client runs. Those that Anthropic runs or defines aren't known to the model."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    allowed_callers: list[str] | None = None
    cache_control: Hint = None
    defer_loading: Hint = None
    eager_input_streaming: Hint = None
    input_examples: Hint = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """budget_tokens is accepted and not enforced: these models end their thoughts themselves."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class BoundedChat(DialectChat):
    """A chat whose max_tokens is what its client can take at most: the context may end the reply before."""

    names: ClassVar[dict[str, str]] = {
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
        "tool_choice.function.name": "tool_choice.name",
    }

    def fit(self, params: SamplingParams, prompts: Sequence[Prompt], context: int) -> SamplingParams:
        room = context - max(len(prompt.token_ids) for prompt in prompts)
        if params.max_tokens is None or params.max_tokens <= room or room < 1:
            return params
        return params.with_(max_tokens=room)


class CountTokensRequest(Body):
    """POST /v1/messages/count_tokens."""

    tags = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result"})
    inert: ClassVar[dict[str, tuple[Any, ...]]] = {
        "compaction": (),
        "container": (),
        "mcp_servers": ([],),
        "thread": (),
    }

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    system: Annotated[list[TextBlock], *TEXT_BLOCKS] = Field(default_factory=list)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Hint = None
    context_management: Hint = None
    billing_policy: Hint = None
    fallback_credit_token: Hint = None
    fallbacks: Hint = None
    speed: Hint = None
    user_profile_id: Hint = None
    workspace_id: Hint = None

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        if body.get("thread") is not None:  # by this code clients know to send whole conversations
            message = "thread is not supported; send the whole conversation"
            raise InvalidRequest(message, param="thread", code="thread_unsupported_request")
        return super().parse(body)

    @property
    def shows_thoughts(self) -> bool:
        """Whether the client asked for thinking blocks; without them the model may think all the same."""
        return self.thinking is not None and self.thinking.type != "disabled"

    def chat(self, switches: frozenset[str]) -> ChatRequest:
        """The chat that this is. switches: the template's. InvalidRequest: what a chat can't say."""
        effort = self.output_config.effort if self.output_config is not None else None
        thinking = thinking_fields(switches, effort=effort, on=self.shows_thoughts)
        return BoundedChat.parse({**self._extras(), **self._chat_fields(), **thinking})

    def _chat_fields(self) -> dict[str, Any]:
        if self.messages[-1].role == "assistant":
            raise refuse("messages", "the last one is the assistant's; a reply can't be begun for the model")
        system = "\n".join(block.text for block in self.system)
        head = [{"role": "system", "content": system}] if system else []
        return {
            "model": self.model,
            "messages": [*head, *chat_messages(self.messages)],
            "tools": [_chat_tool(tool, f"tools[{at}]") for at, tool in enumerate(self.tools)] or None,
            "include_reasoning": self.shows_thoughts,
            **self._choice(),
            **self._format(),
        }

    def _choice(self) -> dict[str, Any]:
        if self.tool_choice is None:
            return {}
        kind, name = self.tool_choice.type, self.tool_choice.name
        if (kind == "tool") != (name is not None):
            raise refuse("tool_choice.name", "belongs to the type 'tool', which needs it")
        wanted: Any = {"auto": "auto", "none": "none", "any": "required"}.get(kind)
        choice = wanted or {"type": "function", "function": {"name": name}}
        alone = self.tool_choice.disable_parallel_tool_use
        return {"tool_choice": choice, "parallel_tool_calls": None if alone is None else not alone}

    def _format(self) -> dict[str, Any]:
        asked = self.output_config.format if self.output_config is not None else None
        if asked is None:
            return {}
        schema = {"name": "output", "schema": asked.schema_}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Hint = None
    service_tier: Hint = None
    inference_geo: Hint = None
    diagnostics: Hint = None

    def _chat_fields(self) -> dict[str, Any]:
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        given = {name: getattr(self, name) for name in names}
        return {**super()._chat_fields(), **given, "stop": self.stop_sequences or None}


def _chat_tool(tool: Tool, at: str) -> dict[str, Any]:
    if tool.allowed_callers is not None and "direct" not in tool.allowed_callers:
        raise refuse(f"{at}.allowed_callers", "only 'direct' is supported")
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def chat_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """A conversation in a chat's messages: results of tools become messages of their own."""
    result: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        at = f"messages[{index}].content"
        result += [_assistant(message, at)] if message.role == "assistant" else _turn(message, at)
    return result


def _assistant(message: Message, at: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(message.content):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                raise refuse(f"{at}[{index}]", "a tool's result belongs to a user's message")
            case RedactedThinkingBlock():
                pass
    turn = {"role": "assistant", "content": "".join(texts), "reasoning_content": "".join(thoughts), "tool_calls": calls}
    return {name: value for name, value in turn.items() if value or name == "content"}


def _turn(message: Message, at: str) -> Iterator[dict[str, Any]]:
    """A user's or system message: its texts, and the results between them."""
    texts: list[str] = []
    said = False
    for index, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock) and message.role == "user":
            if texts:
                yield {"role": "user", "content": "\n".join(texts)}
                texts = []
            mark = ERROR_MARK if block.is_error else ""
            content = mark + "\n".join(part.text for part in block.content)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
            said = True
        else:
            raise refuse(f"{at}[{index}].type", f"{block.type!r} doesn't belong to a {message.role} message")
    if texts or not said:
        yield {"role": message.role, "content": "\n".join(texts)}
