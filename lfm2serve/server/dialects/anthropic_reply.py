"""Anthropic's message, whole and as events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lfm2serve.errors import Lfm2Error
from lfm2serve.reply import ReplyBuilder, ReplyDelta
from lfm2serve.server.dialects.anthropic import MessagesRequest
from lfm2serve.server.dialects.parts import Part, PartStream, Step, parts_of
from lfm2serve.server.errors import anthropic_body, body_of
from lfm2serve.server.group import Reply
from lfm2serve.server.responses import extension
from lfm2serve.server.shape import Shape

SIGNATURE = "unsigned"  # clients want one, and send it back; thoughts come back as they are

DELTAS = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageShape(Shape):
    """A message's blocks are the reply's parts; thinking blocks are for clients that asked for thinking."""

    named_events = True

    def __init__(self, request: MessagesRequest, model: str, seed: int) -> None:
        self._omits_thoughts = request.thinking is not None and request.thinking.display == "omitted"
        self._max_tokens = request.max_tokens
        self._parts = PartStream()
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}
        self._seed = seed
        self._begun = False

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        [reply] = replies
        blocks = [self._block(part) for part in parts_of(reply.builder)]
        return {**self._head, "content": blocks, **self._end(reply), "usage": usage(reply)}

    def chunks(self, reply: Reply, delta: ReplyDelta) -> Iterable[dict[str, Any]]:
        if not self._begun:
            self._begun = True
            counts = {**usage(reply), "output_tokens": 0}
            nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            yield {"type": "message_start", "message": {**self._head, **nothing, "usage": counts}}
        for step, part, piece in self._parts.take(delta):
            yield from self._events(step, part, piece)

    def closing(self, replies: Sequence[Reply]) -> Iterable[dict[str, Any]]:
        [reply] = replies
        end = self._end(reply)
        more = {"lfm2serve": end.pop("lfm2serve")}
        yield {"type": "message_delta", "delta": end, "usage": usage(reply), **more}
        yield {"type": "message_stop"}

    def failure(self, error: Exception) -> Iterable[dict[str, Any]]:
        yield anthropic_body(body_of(error), error.status if isinstance(error, Lfm2Error) else 500)

    def _events(self, step: Step, part: Part, piece: str) -> Iterator[dict[str, Any]]:
        at = {"index": part.index}
        hidden = self._omits_thoughts and part.kind == "thought"
        match step:
            case Step.BEGIN:
                yield {"type": "content_block_start", **at, "content_block": self._block(part, begun=True)}
            case Step.GROW if not hidden:
                kind, field = DELTAS[part.kind]
                yield {"type": "content_block_delta", **at, "delta": {"type": kind, field: piece}}
            case Step.END:
                if part.kind == "thought":
                    signed = {"type": "signature_delta", "signature": SIGNATURE}
                    yield {"type": "content_block_delta", **at, "delta": signed}
                yield {"type": "content_block_stop", **at}

    def _block(self, part: Part, *, begun: bool = False) -> dict[str, Any]:
        """A part as a block. begun: as it stands where the block begins."""
        text = "" if begun else part.text
        match part.kind:
            case "thought":
                thought = "" if self._omits_thoughts else text
                return {"type": "thinking", "thinking": thought, "signature": "" if begun else SIGNATURE}
            case "text":
                return {"type": "text", "text": text}
            case "call":
                values = json.loads(text) if text else {}
                return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": values}

    def _end(self, reply: Reply) -> dict[str, Any]:
        stop = reply.builder.stop_reason
        told = {**extension(reply)["lfm2serve"], "seed": self._seed}
        reason = stop_reason(reply.builder, self._max_tokens)
        sequence = stop if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": sequence, "lfm2serve": told}


def stop_reason(built: ReplyBuilder, max_tokens: int) -> str:
    """Why a reply ended, in Anthropic's words."""
    if built.finish_reason == "length":
        return "max_tokens" if len(built.token_ids) >= max_tokens else "model_context_window_exceeded"
    if built.finish_reason == "tool_calls":
        return "tool_use"
    return "stop_sequence" if isinstance(built.stop_reason, str) else "end_turn"


def usage(reply: Reply) -> dict[str, Any]:
    """Anthropic counts the tokens that came from the cache apart from the others."""
    prompt, cached = len(reply.prompt.token_ids), reply.cached_tokens
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": len(reply.builder.token_ids),
    }
