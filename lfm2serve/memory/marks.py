"""Where the states of a prompt are worth keeping, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lfm2serve.memory.prompt_cache import Mark

if TYPE_CHECKING:
    from lfm2serve.chat.prompt import ChatPrompt


def chat_marks(prompt: ChatPrompt) -> list[tuple[int, Mark]]:
    """(tokens before it, kind) of each mark of a chat, most important first; every place once."""
    places = (
        (prompt.history_end, Mark.HISTORY),
        (prompt.last_user, Mark.LAST_USER),
        (prompt.shared, Mark.SHARED),
        (prompt.settled, Mark.SHARED),
    )
    marks: dict[int, Mark] = {}
    for at, mark in places:
        if at is not None:
            marks.setdefault(at, mark)
    return list(marks.items())


def raw_marks(length: int) -> list[tuple[int, Mark]]:
    """The mark of a raw prompt: its length - 1, so that the same prompt has one row left to run."""
    return [(length - 1, Mark.PROMPT)] if length > 1 else []
