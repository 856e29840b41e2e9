"""OpenAI's requests of POST /v1/responses, and the chats that they come down to."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from lfm2serve.server.dialects.fields import Body, DialectChat, Hint, list_or_text, refuse, thinking_fields
from lfm2serve.server.dialects.response_items import Item, chat_messages
from lfm2serve.server.dialects.response_tools import Mode, ToolBox, ToolChoice, ToolItem
from lfm2serve.server.requests import ChatRequest, Strict

ONE_MESSAGE = list_or_text(lambda text: {"type": "message", "role": "user", "content": text})


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Strict):
    format: TextFormat | None = None
    verbosity: Hint = None


class Reasoning(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Hint = None
    generate_summary: Hint = None
    context: Hint = None
    mode: Hint = None


class ResponseStreamOptions(Strict):
    include_obfuscation: Hint = None


# What other servers add to their items; nothing of the kind is left out of ours.
Included = Literal[
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesChat(DialectChat):
    names: ClassVar[dict[str, str]] = {
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "max_tokens": "max_output_tokens",
    }


class ResponsesRequest(Body):
    """POST /v1/responses."""

    tags = frozenset(
        (
            *("message", "reasoning", "function_call", "custom_tool_call"),
            *("function_call_output", "custom_tool_call_output", "refusal"),
            *("input_text", "output_text", "text", "function", "custom", "namespace"),
            *("none", "auto", "required", "allowed_tools"),
        )
    )
    inert: ClassVar[dict[str, tuple[Any, ...]]] = {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "moderation": (),
        "prompt": (),
        "top_logprobs": (0,),
    }

    model: str | None = None
    input: Annotated[list[Item], Field(min_length=1), *ONE_MESSAGE]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[ToolItem] = Field(default_factory=list)
    tool_choice: ToolChoice = Field(default_factory=lambda: Mode(type="auto"))
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[Included] = Field(default_factory=list)
    metadata: dict[str, Any] | None = None
    user: str | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    stream_options: ResponseStreamOptions | None = None
    max_tool_calls: Hint = None
    client_metadata: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_options: Hint = None
    prompt_cache_retention: Hint = None
    safety_identifier: Hint = None
    service_tier: Hint = None

    def messages(self) -> list[dict[str, Any]]:
        """What the input adds to the conversation. InvalidRequest: items that mean nothing."""
        return chat_messages(self.input)

    def chat(self, tools: ToolBox, messages: list[dict[str, Any]], switches: frozenset[str]) -> ChatRequest:
        """The chat that this is. messages: the whole conversation, without the instructions. switches: the template's.

        InvalidRequest: what a chat can't say.
        """
        if not messages:
            raise refuse("input", "says nothing")
        head = [{"role": "system", "content": self.instructions}] if self.instructions else []
        fields = {
            **self._extras(),
            "model": self.model,
            "messages": [*head, *messages],
            **tools.chat_fields(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_tokens": self.max_output_tokens,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "response_format": self._format(),
            **thinking_fields(switches, effort=self.reasoning.effort if self.reasoning is not None else None),
        }
        return ResponsesChat.parse(fields)

    def _format(self) -> dict[str, Any] | None:
        asked = self.text.format if self.text is not None else None
        if asked is None or asked.type == "text":
            return None
        if asked.type == "json_object":
            return {"type": "json_object"}
        if asked.schema_ is None:
            raise refuse("text.format.schema", "is missing")
        given = {"name": asked.name, "description": asked.description, "schema": asked.schema_, "strict": asked.strict}
        return {"type": "json_schema", "json_schema": {k: v for k, v in given.items() if v is not None}}
