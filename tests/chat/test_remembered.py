"""Remembered token ids: the same as asked for anew, each asked for once, and never more than there is room for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from lfm2serve.chat.remembered import Remembered
from lfm2serve.chat.tokenizer import Tokenizer
from tests.chat.test_template import assistant, load, system, user


class Codes:
    """A tokeniser that notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.asked.append(text)
        return [ord(char) for char in text]


@given(st.lists(st.text("ab", max_size=6), max_size=40), st.integers(0, 12))
def test_ids_are_those_of_the_text(texts: list[str], room: int) -> None:
    codes = Codes()
    remembered = Remembered(codes, room)
    held: list[str] = []  # what must still be known, last used last
    for text in texts:
        before = len(codes.asked)
        assert remembered(text) == [ord(char) for char in text]
        assert len(codes.asked) == before + (text not in held)
        if len(text) <= room:
            held = [other for other in held if other != text] + [text]
        while sum(map(len, held)) > room:
            held.pop(0)


def test_a_caller_may_change_its_ids() -> None:
    remembered = Remembered(Codes())
    for _ in range(3):
        ids = remembered("ab")
        assert ids == [97, 98]
        ids.append(0)


def test_many_threads() -> None:
    remembered = Remembered(Codes(), 50)
    texts = [chr(97 + n % 26) * (n % 17) for n in range(2000)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(remembered, texts)) == [[ord(char) for char in text] for text in texts]


def test_a_later_turn_tokenises_only_what_is_new(thinking: Tokenizer) -> None:
    template = load("d", thinking)
    codes = Codes()
    plain, thinking.encode_piece = thinking.encode_piece, Remembered(codes)
    try:
        first = [system("Be kind."), user("What is it?")]
        template.encode(first)
        codes.asked.clear()
        template.encode([*first, assistant("It is late."), user("Thanks <3")])
    finally:
        thinking.encode_piece = plain
    assert codes.asked == ["assistant\nIt is late.", "user\nThanks <3"]
