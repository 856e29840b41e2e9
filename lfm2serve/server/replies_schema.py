"""What the endpoints answer with, as models: for the OpenAPI document, and for tests that hold answers against it.

Every object may have further fields, which clients ignore.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answered(BaseModel):
    model_config = ConfigDict(extra="allow")


class ErrorDetail(Answered):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answered):
    error: ErrorDetail


class AnthropicErrorDetail(Answered):
    type: str
    message: str


class AnthropicError(Answered):
    type: Literal["error"]
    error: AnthropicErrorDetail


class CachedTokens(Answered):
    cached_tokens: int


class Usage(Answered):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CalledFunction(Answered):
    name: str
    arguments: str


class Call(Answered):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answered):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None


class ChatChoice(Answered):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None


class ChatCompletion(Answered):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    seed: int
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(Answered):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None


class Completion(Answered):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    seed: int
    choices: list[TextChoice]
    usage: Usage


class ReasoningTokens(Answered):
    reasoning_tokens: int


class ResponseUsage(Answered):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class OutputItem(Answered):
    id: str
    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    status: Literal["completed", "incomplete"]


class Response(Answered):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    incomplete_details: dict[str, Any] | None
    output: list[OutputItem]
    usage: ResponseUsage
    previous_response_id: str | None
    tools: list[dict[str, Any]]


class DeletedResponse(Answered):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class MessageUsage(Answered):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class ContentBlock(Answered):
    type: Literal["text", "thinking", "tool_use"]


class MessageReply(Answered):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Answered):
    input_tokens: int


class Tokens(Answered):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answered):
    prompt: str


class ModelCard(Answered):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    type: Literal["model"]
    display_name: str
    created_at: str


class ModelList(Answered):
    object: Literal["list"]
    data: list[ModelCard]
    has_more: Literal[False]
    first_id: str
    last_id: str


class Health(Answered):
    status: Literal["ok"]
    model: str


class ClearedCache(Answered):
    object: Literal["prompt_cache"]
    dropped: int


class Memory(Answered):
    """Who holds which memory at this moment."""

    object: Literal["memory"]
    time: float
