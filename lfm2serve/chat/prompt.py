"""A chat's prompt and the places in it where its state is worth keeping.

A place is found by rendering the chat once more, changed as a later request may change it, and comparing the two
texts: what they share up to a control token is tokenised alike in both, since a tokeniser never joins what stands on
the two sides of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count
from typing import Any

from lfm2serve.chat.shield import unused
from lfm2serve.chat.tokenizer import Tokenizer
from lfm2serve.errors import InvalidRequest

HEAD_ROLES = ("system", "developer")

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Token ids, and counts `at` of tokens such that other prompts begin with ids[:at].

    history_end: without the generation prompt; the next turn begins with it. last_user: up to the last user message's
    text, which may be edited. shared: up to the first turn behind system messages and tools; other chats with the same
    ones begin with it. settled: what the next user turn keeps where it's less than history_end, since the template
    then drops thoughts that it still shows now.

    None: there is no such place, or only control tokens stand before it, or nothing behind it.
    """

    ids: list[int]
    history_end: int | None = None
    last_user: int | None = None
    shared: int | None = None
    settled: int | None = None


def find_places(
    tokenizer: Tokenizer, ids: list[int], text: str, values: Values, render: Callable[[Values], str]
) -> ChatPrompt:
    """The prompt with its places.

    text: what `values` render to, in which every control string is a control token of `ids`. render: renders changed
    values; where it raises InvalidRequest there is no such place.
    """
    rendered = _Rendered(tokenizer, ids, text)
    messages: Sequence[Values] = values["messages"]
    [probe] = unused([text], 1)  # differs from whatever stands in its place
    user, assistant = {"role": "user", "content": probe}, {"role": "assistant", "content": probe}

    def place(**changes: Any) -> int | None:
        try:
            return rendered.shared_with(render({**values, **changes}))
        except InvalidRequest:
            return None

    history_end = place(add_generation_prompt=False)
    last = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=None)
    last_user = None
    if last is not None:
        last_user = place(messages=[*messages[:last], {**messages[last], "content": probe}, *messages[last + 1 :]])
    head = next((at for at, message in enumerate(messages) if message["role"] not in HEAD_ROLES), len(messages))
    shared = place(messages=[*messages[:head], user])
    settled = place(messages=[*messages, assistant, user])
    return ChatPrompt(
        ids,
        history_end,
        last_user,
        shared if shared != last_user else None,
        settled if settled is not None and settled < (history_end or len(ids)) else None,
    )


class _Rendered:
    """A rendered text and its ids, in pieces: text, control string, text ... text."""

    def __init__(self, tokenizer: Tokenizer, ids: list[int], text: str) -> None:
        self._pattern = tokenizer.control_pattern
        self._pieces = self._split(text)
        control_ids = set(tokenizer.control_tokens.values())
        controls = compress(count(), map(control_ids.__contains__, ids))
        self._ends = [end for at in controls for end in (at, at + 1)] + [len(ids)]  # of each piece, in tokens

    def _split(self, text: str) -> list[str]:
        pieces, at = [], 0
        for match in self._pattern.finditer(text):
            pieces += [text[at : match.start()], match[0]]
            at = match.end()
        return [*pieces, text[at:]]

    def shared_with(self, other: str) -> int | None:
        """Tokens of the pieces that both texts begin with; None: only control tokens, or all of them."""
        pieces = self._split(other)
        pairs = enumerate(zip(self._pieces, pieces, strict=False))
        same = next((n for n, (ours, theirs) in pairs if ours != theirs), min(len(self._pieces), len(pieces)))
        if not any(self._pieces[:same:2]):
            return None
        at = self._ends[same - 1]
        return at if at < self._ends[-1] else None
