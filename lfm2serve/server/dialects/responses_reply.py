"""OpenAI's response object, whole and as events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from lfm2serve.chat.tokenizer import Tokenizer
from lfm2serve.reply import ReplyDelta
from lfm2serve.sampling import SamplingParams
from lfm2serve.server.dialects.parts import Part, PartStream, Step, parts_of, thought_tokens
from lfm2serve.server.dialects.response_tools import CUSTOM_INPUT, Mode, ToolBox
from lfm2serve.server.dialects.responses import ResponsesRequest
from lfm2serve.server.errors import body_of
from lfm2serve.server.group import Reply
from lfm2serve.server.responses import extension
from lfm2serve.server.shape import Shape

Ended = Callable[[dict[str, Any], dict[str, Any]], None]  # told the response and the reply as a chat's message

CONTENT = {"thought": "reasoning_text", "text": "output_text"}


class ResponseShape(Shape):
    """A response's items are the reply's parts, one open at a time."""

    named_events = True

    def __init__(
        self,
        request: ResponsesRequest,
        tools: ToolBox,
        params: SamplingParams,
        tokenizer: Tokenizer,
        on_end: Ended,
        model: str,
        seed: int,
    ) -> None:
        """on_end: told of a response that came to its end."""
        self._tools = tools
        self._tokenizer = tokenizer
        self._on_end = on_end
        self._parts = PartStream()
        self._key = uuid.uuid4().hex
        self._seed = seed
        self._count = 0
        self._head = _head(request, tools, params, f"resp_{self._key}", model)

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        return self._ended(replies, parts_of(replies[0].builder))

    def chunks(self, reply: Reply, delta: ReplyDelta) -> Iterable[dict[str, Any]]:
        if self._count == 0:
            response = {**self._head, "status": "in_progress", "output": [], "usage": None}
            yield self._event("created", response=response)
            yield self._event("in_progress", response=response)
        for step, part, piece in self._parts.take(delta):
            match step:
                case Step.BEGIN:
                    yield from self._begin(part)
                case Step.GROW:
                    yield from self._grow(part, piece)
                case Step.END:
                    yield from self._end(part, _status(part, reply))

    def closing(self, replies: Sequence[Reply]) -> Iterable[dict[str, Any]]:
        response = self._ended(replies, self._parts.parts)
        yield self._event(response["status"], response=response)

    def failure(self, error: Exception) -> Iterable[dict[str, Any]]:
        told = body_of(error)["error"]
        failed = {"code": "server_error", "message": told["message"]}
        output = [self._item(part, "incomplete") for part in self._parts.parts]
        response = {**self._head, "status": "failed", "output": output, "usage": None, "error": failed}
        yield self._event("failed", response=response)

    def _ended(self, replies: Sequence[Reply], parts: Sequence[Part]) -> dict[str, Any]:
        [reply] = replies
        cut = reply.builder.finish_reason == "length"
        output = [self._item(part, _status(part, reply)) for part in parts]
        response = {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": self._usage(reply),
            "lfm2serve": {**extension(reply)["lfm2serve"], "seed": self._seed},
        }
        self._on_end(response, reply.message)
        return response

    def _usage(self, reply: Reply) -> dict[str, Any]:
        prompt, output = len(reply.prompt.token_ids), len(reply.builder.token_ids)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": thought_tokens(reply.builder, self._tokenizer)},
            "total_tokens": prompt + output,
        }

    def _event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        self._count += 1
        return {"type": f"response.{name}", "sequence_number": self._count - 1, **fields}

    def _begin(self, part: Part) -> Iterator[dict[str, Any]]:
        yield self._event("output_item.added", output_index=part.index, item=self._item(part, "in_progress"))
        if part.kind != "call":
            yield self._event("content_part.added", **self._at(part, 0), part=_content(part, ""))

    def _grow(self, part: Part, piece: str) -> Iterator[dict[str, Any]]:
        match part.kind:
            case "thought":
                yield self._event("reasoning_text.delta", **self._at(part, 0), delta=piece)
            case "text":
                yield self._event("output_text.delta", **self._at(part, 0), delta=piece, logprobs=[])
            case "call" if not self._tools.called(part.name).custom:
                yield self._event("function_call_arguments.delta", **self._at(part), delta=piece)

    def _end(self, part: Part, status: str) -> Iterator[dict[str, Any]]:
        item = self._item(part, status)
        match part.kind:
            case "thought":
                yield self._event("reasoning_text.done", **self._at(part, 0), text=part.text)
            case "text":
                yield self._event("output_text.done", **self._at(part, 0), text=part.text, logprobs=[])
            case "call" if item["type"] == "custom_tool_call":
                yield self._event("custom_tool_call_input.delta", **self._at(part), delta=item["input"])
                yield self._event("custom_tool_call_input.done", **self._at(part), input=item["input"])
            case "call":
                told = {"name": item["name"], "arguments": part.text}
                yield self._event("function_call_arguments.done", **self._at(part), **told)
        if part.kind != "call":
            yield self._event("content_part.done", **self._at(part, 0), part=_content(part, part.text))
        yield self._event("output_item.done", output_index=part.index, item=item)

    def _at(self, part: Part, content_index: int | None = None) -> dict[str, Any]:
        at: dict[str, Any] = {"item_id": self._item_id(part), "output_index": part.index}
        return at if content_index is None else {**at, "content_index": content_index}

    def _item_id(self, part: Part) -> str:
        prefix = {"thought": "rs", "text": "msg", "call": "fc"}[part.kind]
        return f"{prefix}_{self._key}_{part.index}"

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        """A part as an item, empty while it is in progress."""
        begun = status == "in_progress"
        content = [] if begun else [_content(part, part.text)]
        item: dict[str, Any] = {"id": self._item_id(part), "status": status}
        match part.kind:
            case "thought":
                return {**item, "type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
            case "text":
                return {**item, "type": "message", "role": "assistant", "content": content}
            case "call":
                return {**item, **self._call(part, "" if begun else part.text)}

    def _call(self, part: Part, arguments: str) -> dict[str, Any]:
        called = self._tools.called(part.name)
        names = {"name": called.name} | ({} if called.namespace is None else {"namespace": called.namespace})
        if not called.custom:
            return {"type": "function_call", "call_id": part.call_id, **names, "arguments": arguments}
        given = json.loads(arguments).get(CUSTOM_INPUT, "") if arguments else ""
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return {"type": "custom_tool_call", "call_id": part.call_id, **names, "input": text}


def _status(part: Part, reply: Reply) -> str:
    return "incomplete" if part.last and reply.builder.finish_reason == "length" else "completed"


def _content(part: Part, text: str) -> dict[str, Any]:
    if part.kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _head(request: ResponsesRequest, tools: ToolBox, params: SamplingParams, name: str, model: str) -> dict[str, Any]:
    """What a response repeats of its request."""
    choice = request.tool_choice
    reasoning = request.reasoning
    text = request.text.format if request.text is not None else None
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "model": model,
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": None},
        "service_tier": "default",
        "store": request.store,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"} if text is None else text.model_dump(exclude_none=True, by_alias=True)},
        "tool_choice": choice.type if isinstance(choice, Mode) else choice.model_dump(exclude_none=True),
        "tools": tools.shown,
        "top_logprobs": 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": request.user,
    }
