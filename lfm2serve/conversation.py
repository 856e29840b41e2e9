"""A chat request: its prompt with the places worth keeping, and the conversation that its client comes back with."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lfm2serve.chat.prompt import ChatPrompt
from lfm2serve.chat.reply_parts import Reading
from lfm2serve.chat.template import ChatTemplate
from lfm2serve.chat.tool_choice import ToolUse
from lfm2serve.engine import Engine
from lfm2serve.errors import InvalidRequest
from lfm2serve.memory.marks import chat_marks
from lfm2serve.reply import ReplyBuilder
from lfm2serve.structured import Thinking

log = logging.getLogger("lfm2serve.cache")


def message_of(reply: ReplyBuilder) -> dict[str, Any]:
    """A finished reply as the assistant message that its client gets, and sends back."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["content"] = reply.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
    return message


class Conversation:
    """Messages as they were sent.

    token_ids: the prompt. thinking: whether the reply begins with a thought. marks: where its states are kept (none
    with keeps False, which spares the rendering too).
    After each of its replies one of `answered` and `abandoned` is due; both may be called from any thread.
    """

    def __init__(
        self,
        template: ChatTemplate,
        engine: Engine,
        messages: Sequence[Mapping[str, Any]],
        *,
        keeps: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        switches: Mapping[str, Any] | None = None,
    ) -> None:
        """switches: variables for the template. InvalidRequest: messages or tools that it can't render."""
        self._template = template
        self._engine = engine
        self._messages = list(messages)
        self._keeps = keeps
        self._how: dict[str, Any] = {"tools": tools, **(switches or {})}
        how: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, **self._how}
        prompt = template.prompt(messages, **how) if keeps else ChatPrompt(template.encode(messages, **how))
        self.token_ids = prompt.ids
        self.thinking = Thinking.MAYBE if template.knows_thoughts else Thinking.NEVER
        if add_generation_prompt and template.opens_thought(prompt.ids):
            self.thinking = Thinking.OPENED
        self.marks = chat_marks(prompt)

    def reading(self, use: ToolUse, hidden: bool = False) -> Reading:
        """How its replies are read. hidden: without their thoughts."""
        return Reading(use.offered, use.parallel, self.thinking is Thinking.OPENED, hidden)

    def answered(self, stream_id: int, message: Mapping[str, Any]) -> None:
        """Tell the engine what the client will send back: its messages, and the reply as it got it.

        Takes as long as tokenising a prompt: not for an event loop.
        """
        if not self._keeps:
            return
        try:
            ids = self._template.encode([*self._messages, message], add_generation_prompt=False, **self._how)
        except InvalidRequest as error:
            log.debug("the reply of stream %d can't come back: %s", stream_id, error.message)
            self.abandoned(stream_id)
        else:
            self._engine.returned(stream_id, ids)

    def abandoned(self, stream_id: int) -> None:
        """Tell the engine that nobody has the reply, or that it failed."""
        if self._keeps:
            self._engine.forget(stream_id)
