"""OpenAI's response shapes (with vLLM's extra fields), whole and in chunks."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from lfm2serve.chat.detokenize import Detokenizer
from lfm2serve.chat.tokenizer import Tokenizer
from lfm2serve.chat.tool_calls import ToolCallDelta
from lfm2serve.outputs import Logprob
from lfm2serve.reply import ReplyDelta
from lfm2serve.server.errors import body_of
from lfm2serve.server.group import Reply
from lfm2serve.server.requests import ChatRequest, CompletionRequest
from lfm2serve.server.shape import Shape

Step = dict[int, Logprob] | None  # one token's log-probabilities: its own and the most likely ones'


def usage(replies: Sequence[Reply]) -> dict[str, Any]:
    """Token counts over all replies; a prompt with several replies counts once."""
    firsts = {id(reply.prompt): reply for reply in reversed(replies)}.values()
    prompt = sum(len(reply.prompt.token_ids) for reply in firsts)
    completion = sum(len(reply.builder.token_ids) for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(reply.cached_tokens for reply in firsts)},
    }


def extension(reply: Reply) -> dict[str, Any]:
    """What no other server tells of a finished reply: how the prompt cache and drafting served it.

    hit: kind of mark whose kept state it resumed; missed: why a longer one wasn't, where there was one.
    """
    metrics = reply.builder.metrics
    assert metrics is not None, "a finished reply has had an event"
    return {
        "lfm2serve": {
            "cache": {
                "hit": metrics.cache_hit,
                "missed": metrics.cache_missed,
                "cached_tokens": metrics.cached_tokens,
            },
            "drafts": {"tokens": metrics.draft_tokens, "accepted": metrics.accepted_tokens},
        }
    }


def top_of(step: dict[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The `count` most likely tokens of a step, best first."""
    ranked = sorted((p.rank, i) for i, p in step.items() if p.rank is not None and p.rank <= count)
    return [(i, step[i]) for _, i in ranked]


def prompt_steps(reply: Reply) -> list[tuple[int, Step]]:
    """Each prompt token with its log-probabilities; the first one has none."""
    steps = reply.builder.prompt_logprobs
    assert steps is not None, "the engine gives them before the first token"
    return list(zip(reply.prompt.token_ids, steps, strict=True))


def prompt_logprobs(reply: Reply, asked: int) -> list[dict[str, Any] | None]:
    """vLLM's prompt_logprobs: for each prompt token (null for the first) token id -> log-probability, rank and text."""
    return [
        None
        if step is None
        else {
            str(i): {"logprob": p.logprob, "rank": p.rank, "decoded_token": p.decoded_token}
            for i, p in [(token, step[token]), *top_of(step, asked)]
        }
        for token, step in prompt_steps(reply)
    ]


class _OpenAIShape(Shape):
    """What chats and completions share. Every chunk of a stream carries the same id, time, model and seed."""

    end_mark = "[DONE]"
    whole_object: str
    chunk_object: str
    id_prefix: str

    def __init__(self, request: ChatRequest | CompletionRequest, tokenizer: Tokenizer, model: str, seed: int) -> None:
        self._tokenizer = tokenizer
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "seed": seed,
        }
        self._begun: set[int] = set()
        self._include_usage = request.include_usage
        self._null_usage = {"usage": None} if request.include_usage else {}

    @abstractmethod
    def choice(self, reply: Reply) -> dict[str, Any]:
        """A finished reply."""

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        choices = [self.choice(reply) for reply in replies]
        return {"object": self.whole_object, **self._head, "choices": choices, "usage": usage(replies)}

    def closing(self, replies: Sequence[Reply]) -> Iterable[dict[str, Any]]:
        if self._include_usage:
            yield {"object": self.chunk_object, **self._head, "choices": [], "usage": usage(replies)}

    def failure(self, error: Exception) -> Iterable[dict[str, Any]]:
        yield body_of(error)

    def _chunk(self, choice: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"object": self.chunk_object, **self._head, "choices": [choice], **more, **self._null_usage}

    def _begins(self, reply: Reply) -> bool:
        first = reply.index not in self._begun
        self._begun.add(reply.index)
        return first


class ChatShape(_OpenAIShape):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, request: ChatRequest, tokenizer: Tokenizer, model: str, seed: int) -> None:
        super().__init__(request, tokenizer, model, seed)
        self._request = request

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        body = super().whole(replies)
        if self._request.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(replies[0], self._request.prompt_logprobs)
        if self._request.return_token_ids:
            body["prompt_token_ids"] = replies[0].prompt.token_ids
        return body

    def choice(self, reply: Reply) -> dict[str, Any]:
        built = reply.builder
        choice = {
            "index": reply.index,
            "message": {**reply.message, "refusal": None},
            "logprobs": self._logprobs(built.token_ids, built.logprobs),
            "finish_reason": built.finish_reason,
            "stop_reason": built.stop_reason,
            **extension(reply),
        }
        if self._request.return_token_ids:
            choice["token_ids"] = built.token_ids
        return choice

    def chunks(self, reply: Reply, delta: ReplyDelta) -> Iterable[dict[str, Any]]:
        ids = self._request.return_token_ids
        if self._begins(reply):
            first = {"role": "assistant", "content": ""}
            more = {"prompt_token_ids": reply.prompt.token_ids} if ids else {}
            yield self._chunk({"index": reply.index, "delta": first, "logprobs": None, "finish_reason": None}, **more)
        asked = (ids or self._request.logprobs) and delta.token_ids
        gained = self._gained(delta)
        if gained or delta.finish_reason is not None or asked:
            choice: dict[str, Any] = {
                "index": reply.index,
                "delta": gained or ({"content": ""} if asked else {}),
                "logprobs": self._logprobs(delta.token_ids, delta.logprobs) if delta.token_ids else None,
                "finish_reason": delta.finish_reason,
            }
            if delta.finish_reason is not None:
                choice |= {"stop_reason": delta.stop_reason, **extension(reply)}
            if ids:
                choice["token_ids"] = delta.token_ids
            yield self._chunk(choice)

    def _gained(self, delta: ReplyDelta) -> dict[str, Any]:
        """A chunk's delta: what is said, thought and called."""
        gained: dict[str, Any] = {}
        if delta.text:
            gained["content"] = delta.text
        if delta.reasoning:
            gained["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            gained["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
        return gained

    def _logprobs(self, ids: Sequence[int], steps: Sequence[dict[int, Logprob]] | None) -> dict[str, Any] | None:
        if not self._request.logprobs or steps is None:
            return None
        count = self._request.top_logprobs or 0
        content = []
        for token, step in zip(ids, steps, strict=True):
            top = [self._entry(i, p) for i, p in top_of(step, count)]
            content.append({**self._entry(token, step[token]), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, value: Logprob) -> dict[str, Any]:
        """bytes: the token's own, since a token can be part of a character."""
        return {
            "token": self._tokenizer.token_text(token),
            "logprob": value.logprob,
            "bytes": list(self._tokenizer.token_bytes(token)),
        }


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    """What a call gained; its first piece says which call it is."""
    function: dict[str, Any] = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.index, "function": function}
    return {"index": call.index, "id": call.id, "type": "function", "function": {"name": call.name, **function}}


class CompletionShape(_OpenAIShape):
    whole_object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, request: CompletionRequest, tokenizer: Tokenizer, model: str, seed: int) -> None:
        super().__init__(request, tokenizer, model, seed)
        self._request = request
        self._skip_special = request.skip_special_tokens is not False
        self._places: dict[int, _Places] = {}

    def choice(self, reply: Reply) -> dict[str, Any]:
        built = reply.builder
        whole = ReplyDelta(
            text=built.text,
            token_ids=built.token_ids,
            logprobs=built.logprobs,
            finish_reason=built.finish_reason,
            stop_reason=built.stop_reason,
        )
        choice = self._piece(reply, whole, first=True)
        if self._request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(reply, self._request.prompt_logprobs)
        return choice

    def chunks(self, reply: Reply, delta: ReplyDelta) -> Iterable[dict[str, Any]]:
        first = self._begins(reply)
        asked = (self._request.return_token_ids or self._request.logprobs is not None) and delta.token_ids
        if delta.text or delta.finish_reason is not None or asked or (first and self._request.echo):
            yield self._chunk(self._piece(reply, delta, first))

    def _piece(self, reply: Reply, delta: ReplyDelta, first: bool) -> dict[str, Any]:
        """A choice with what `delta` adds; the first one of an echo begins with the prompt."""
        echo = first and self._request.echo
        piece = {
            "index": reply.index,
            "text": self._echo(reply) + delta.text if echo else delta.text,
            "logprobs": self._logprobs(reply, delta, echo),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if delta.finish_reason is not None:
            piece |= extension(reply)
        if self._request.return_token_ids:
            piece["token_ids"] = delta.token_ids
            if first:
                piece["prompt_token_ids"] = reply.prompt.token_ids
        return piece

    def _echo(self, reply: Reply) -> str:
        if reply.prompt.text is not None:
            return reply.prompt.text
        return self._tokenizer.decode(reply.prompt.token_ids, skip_special_tokens=self._skip_special)

    def _logprobs(self, reply: Reply, delta: ReplyDelta, echo: bool) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        pairs: list[tuple[int, Step]] = []
        offsets: list[int] = []
        if echo:
            pairs += prompt_steps(reply)
            offsets += self._prompt_offsets(reply)
        if delta.logprobs is not None:
            pairs += zip(delta.token_ids, delta.logprobs, strict=True)
            offsets += self._places_of(reply).of(delta.token_ids)
        return {
            "tokens": [self._tokenizer.token_text(token) for token, _ in pairs],
            "token_logprobs": [None if step is None else step[token].logprob for token, step in pairs],
            "top_logprobs": [None if step is None else self._top(token, step) for token, step in pairs],
            "text_offset": offsets,
        }

    def _places_of(self, reply: Reply) -> _Places:
        if reply.index not in self._places:
            start = len(self._echo(reply)) if self._request.echo else 0
            self._places[reply.index] = _Places(self._tokenizer, self._skip_special, start)
        return self._places[reply.index]

    def _prompt_offsets(self, reply: Reply) -> list[int]:
        """Where each prompt token begins in the echo. Control strings that were typed have their width, the begin
        token that we added has none."""
        prompt = reply.prompt
        if prompt.text is None:
            return _Places(self._tokenizer, self._skip_special, 0).of(prompt.token_ids)
        first = prompt.token_ids[0]
        added = first == self._tokenizer.bos_token_id and not prompt.text.startswith(self._tokenizer.token_text(first))
        typed = prompt.token_ids[1:] if added else prompt.token_ids
        return [0] * added + _Places(self._tokenizer, False, 0).of(typed)

    def _top(self, token: int, step: dict[int, Logprob]) -> dict[str, float]:
        """Text -> log-probability of the most likely tokens and the chosen one; of two with one text, the likelier."""
        top: dict[str, float] = {}
        for i, value in [*top_of(step, self._request.logprobs or 0), (token, step[token])]:
            top.setdefault(self._tokenizer.token_text(i), value.logprob)
        return top


class _Places:
    """Where each token's text begins, in characters: a token inside a character begins where the character does."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, start: int) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special)
        self._at = start

    def of(self, ids: Sequence[int]) -> list[int]:
        places = []
        for token in ids:
            text = self._detokenizer.push([token])
            own = len(self._tokenizer.token_text(token))
            places.append(self._at + max(0, len(text) - own))  # what comes first is the rest of a broken character
            self._at += len(text)
        return places
