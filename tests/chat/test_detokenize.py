"""Pieces of text: whole characters, no stop string's start, the same text however it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lfm2serve.chat.detokenize import Detokenizer, StopStrings
from lfm2serve.chat.tokenizer import Tokenizer


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte."""
    singles = {tokenizer.token_bytes(n): n for n in range(tokenizer.size) if len(tokenizer.token_bytes(n)) == 1}
    return [singles[bytes([byte])] for byte in data]


def test_split_character_waits_for_its_last_byte(tokenizer: Tokenizer) -> None:
    text = Detokenizer(tokenizer)
    first, second = byte_ids(tokenizer, "ď".encode())
    assert text.push([first]) == ""
    assert text.push([second]) == "ď"
    assert text.finish() == ""


def test_emoji_and_japanese_leave_whole(tokenizer: Tokenizer) -> None:
    text = Detokenizer(tokenizer)
    pieces = [text.push([number]) for number in byte_ids(tokenizer, "日本語 🎉 ď ∑".encode())]
    assert [piece for piece in pieces if piece] == list("日本語 🎉 ď ∑")
    assert text.finish() == ""


def test_invalid_bytes_become_replacement_characters_without_a_stall(tokenizer: Tokenizer) -> None:
    text = Detokenizer(tokenizer)
    invalid, letter = byte_ids(tokenizer, b"\xffA")
    assert text.push([invalid]) == "�"
    assert text.push([letter]) == "A"


def test_dangling_tail_becomes_one_replacement_character(tokenizer: Tokenizer) -> None:
    text = Detokenizer(tokenizer)
    assert text.push(byte_ids(tokenizer, "🎉".encode()[:3])) == ""
    assert text.finish() == "�"


def test_unused_ids_have_no_text(tokenizer: Tokenizer) -> None:
    text = Detokenizer(tokenizer)
    assert text.push([tokenizer.size, tokenizer.size + 9_999, *byte_ids(tokenizer, b"A")]) == "A"


def cuts(length: int, places: Sequence[int]) -> list[slice]:
    edges = [0, *sorted(place % (length + 1) for place in places), length]
    return [slice(a, b) for a, b in pairwise(edges)]


PLACES = st.lists(st.integers(0, 1000), max_size=12)
CHARACTERS = st.sampled_from([*"aěď日本🎉∑é \n", "\U0001f469\u200d\U0001f680"])
BYTES = st.one_of(
    st.binary(max_size=40),
    st.lists(st.sampled_from(b"A\xc4\x8f\xf0\x9f\x8e\x89\xe6\x97\xa5\xed\xa0\x80\xff\xe0"), max_size=40).map(bytes),
    st.lists(CHARACTERS, max_size=20).map(lambda parts: "".join(parts).encode()),
)


@settings(deadline=None)
@given(data=BYTES, places=PLACES)
def test_joined_pieces_equal_the_decoded_whole_for_any_bytes(
    tokenizer: Tokenizer, data: bytes, places: list[int]
) -> None:
    ids = byte_ids(tokenizer, data)
    text = Detokenizer(tokenizer)
    pieces = [text.push(ids[cut]) for cut in cuts(len(ids), places)]
    joined = "".join(pieces) + text.finish()
    assert joined == tokenizer.decode(ids) == data.decode("utf-8", "replace")
    for piece in pieces:
        piece.encode()  # no half surrogates either


@settings(deadline=None)
@given(data=st.data(), places=PLACES, skip=st.booleans())
def test_joined_pieces_equal_the_decoded_whole_for_any_ids(
    tokenizer: Tokenizer, data: st.DataObject, places: list[int], skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(-1, tokenizer.size + 2), max_size=40))
    text = Detokenizer(tokenizer, skip)
    joined = "".join(text.push(ids[cut]) for cut in cuts(len(ids), places)) + text.finish()
    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)


def stopped(stops: Sequence[str], pieces: Sequence[str], include: bool = False) -> tuple[str, str | None]:
    """Joined text and hit of a stream that ends at the first hit."""
    watch, sent = StopStrings(stops, include), ""
    for piece in pieces:
        safe, hit = watch.push(piece)
        sent += safe
        if hit is not None:
            return sent, hit
    return sent + watch.finish(), None


@pytest.mark.parametrize(
    ("stops", "text", "left", "hit"),
    [
        (["own fox"], "The quick brown fox jumps", "The quick br", "own fox"),
        (["\nUser:"], "Sure.\nUser: more", "Sure.", "\nUser:"),
        (["five"], "one, two, three, four, five, six", "one, two, three, four, ", "five"),
        (["beta gamma"], "alpha beta gamma delta", "alpha ", "beta gamma"),
        (["Observation:"], "Think. Observation: x", "Think. ", "Observation:"),
        (["Observation:"], "An Observ and Observation", "An Observ and Observation", None),
        (["🎉"], "now 🎉!", "now ", "🎉"),
        (["aab"], "aaab", "a", "aab"),
        (["abab", "b"], "xabab", "xa", "b"),
        (["long stop", "stop"], "a long stop", "a ", "long stop"),
        (["stop", "long stop"], "a long stop", "a long ", "stop"),
        (["never"], "", "", None),
    ],
)
def test_stops_at_every_cut(stops: list[str], text: str, left: str, hit: str | None) -> None:
    kept = left + (hit or "")
    for size in range(1, len(text) + 2):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert stopped(stops, pieces) == (left, hit)
        assert stopped(stops, pieces, include=True) == (kept, hit)


def test_nothing_of_a_stop_is_ever_sent_and_nothing_else_is_held() -> None:
    watch = StopStrings(["\nUser:"])
    assert watch.push("Hello\nUser") == ("Hello", None)
    assert watch.push(" here\n") == ("\nUser here", None)
    assert watch.push("User:") == ("", "\nUser:")
    assert watch.finish() == ""


def test_unsearched_stop_is_text_but_one_that_ends_later_counts() -> None:
    watch = StopStrings(["stop"])
    assert watch.push("a stop", search=False) == ("a stop", None)
    assert watch.push(" and st", search=False) == (" and ", None)
    assert watch.push("op") == ("", "stop")
    watch = StopStrings(["aba", "b"])
    assert watch.push("xab", search=False) == ("x", None)
    assert watch.push("c") == ("abc", None)


def first_hit(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The slow twin: look at every end of the text, and at the stops in their order."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end, stop
    return None


WORDS = st.text("ab🎉", max_size=24)


@settings(deadline=None)
@given(
    text=WORDS, stops=st.lists(st.text("ab🎉", min_size=1, max_size=5), max_size=4), places=PLACES, keep=st.booleans()
)
def test_streamed_stop_equals_the_slow_twin(text: str, stops: list[str], places: list[int], keep: bool) -> None:
    hit = first_hit(text, stops)
    expected = (text, None)
    if hit is not None:
        end, stop = hit
        expected = (text[: end if keep else end - len(stop)], stop)
    assert stopped(stops, [text[cut] for cut in cuts(len(text), places)], keep) == expected


@settings(deadline=None)
@given(text=WORDS, stops=st.lists(st.text("ab🎉", min_size=1, max_size=5), min_size=1, max_size=4))
def test_only_what_could_begin_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    watch = StopStrings(stops)
    safe, hit = watch.push(text)
    if hit is None:
        held = text[len(safe) :]
        longest = max(
            (n for n in range(len(text) + 1) for s in stops if n < len(s) and s.startswith(text[len(text) - n :])),
            default=0,
        )
        assert len(held) == longest
        assert watch.finish() == held
