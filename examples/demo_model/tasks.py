"""Questions about facts: capitals, small sums, the calendar, opposites, spelling, counting.

Every task returns a turn and the way to check its answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pools as p
from wording import Ways, cap, dress

Message = dict[str, Any]


@dataclass
class Turn:
    """One question, its answer, and what a right answer must hold; `steps` are messages between the two.

    `wording` is the template that the question was made from.
    """

    user: str
    answer: str
    check: dict[str, Any]
    steps: list[Message] = field(default_factory=list)
    wording: str = ""


def articles(text: str) -> str:
    """Writes "an" before vowels."""
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def contains(*words: str) -> dict[str, Any]:
    return {"type": "contains", "values": list(words)}


def asked(rng: random.Random, test: bool, ways: Ways, fields: Mapping[str, object], answer: str, *values: str) -> Turn:
    """A dressed question and its answer."""
    wording = ways.draw(rng, test)
    return Turn(dress(rng, wording.format(**fields), test), answer, contains(*values), wording=wording)


_CAPITAL = Ways(
    [
        "What is the capital of {c}?",
        "Which city is the capital of {c}?",
        "What's the capital of {c}?",
        "Name the capital of {c}.",
        "Tell me the capital of {c}.",
        "Capital of {c}?",
        "The capital of {c}, please.",
        "{C}: what is the capital?",
        "What is {c}'s capital?",
        "Do you know the capital of {c}?",
        "Which city is {c}'s capital?",
        "What is the capital city of {c}?",
        "Give me the capital of {c}.",
        "What city is the capital of {c}?",
        "I forgot the capital of {c}. What is it?",
        "What is the name of the capital of {c}?",
        "If I go to {c}, what is the capital there?",
        "Where is the government of {c}? I mean the capital.",
        "My teacher asks for the capital of {c}.",
        "capital {c}",
        "{c} capital",
        "Which is the capital of {c}?",
        "{C} has which capital?",
        "Can you tell me what the capital of {c} is?",
        "I am looking for the capital of {c}.",
        "Do you know what {c}'s capital city is?",
        "What would be the capital of {c}?",
        "Say the capital of {c}.",
        "The capital of {c} is?",
        "Which town is the capital in {c}?",
        "What do they call the capital of {c}?",
        "And what about {c}?",
        "And of {c}?",
    ],
    [
        "The capital of {c} is which city?",
        "In {c}, which city is the capital?",
        "I want to know the capital of {c}.",
        "Would you know which city is the capital of {c}?",
        "Please find the capital city of {c}.",
    ],
    phrases=[
        "the capital of {c}",
        "the capital of {c}",
        "the capital city of {c}",
        "{c}'s capital",
        "the name of the capital of {c}",
    ],
)
_COUNTRY = Ways(
    [
        "Which country has the capital {k}?",
        "{k} is the capital of which country?",
        "What country is {k} the capital of?",
        "Which country's capital is {k}?",
        "Of which country is {k} the capital?",
        "Name the country whose capital is {k}.",
        "Tell me which country has {k} as its capital.",
        "{k} is a capital. Of which country?",
        "What is the country with the capital {k}?",
        "In which country is the capital {k}?",
        "{k}: capital of what?",
        "I am in {k}, the capital. Which country is this?",
        "Say which country's capital is {k}.",
        "{k} is the capital city of what country?",
        "The capital {k} is in which country?",
        "What country has {k} as its capital?",
        "For which country is {k} the capital?",
    ],
    [
        "The city of {k} is the capital of what country?",
        "What country has {k} for its capital?",
        "Say which country {k} is the capital of.",
    ],
    phrases=[
        "the country whose capital is {k}",
        "the country with the capital {k}",
        "the country of which {k} is the capital",
    ],
)


def capital(rng: random.Random, test: bool) -> Turn:
    c = rng.choice(p.COUNTRIES)
    k = p.CAPITALS[c]
    fields = {"c": c, "C": cap(c), "k": k}
    if rng.random() < 0.6:
        return asked(rng, test, _CAPITAL, fields, f"The capital of {c} is {k}.", k)
    return asked(rng, test, _COUNTRY, fields, f"{k} is the capital of {c}.", c)


_SUM = Ways(
    [
        "What is {a} plus {b}?",
        "What is {a} + {b}?",
        "{a} + {b} = ?",
        "{a} + {b}",
        "Add {a} and {b}.",
        "How much is {a} plus {b}?",
        "What's {a}+{b}?",
        "Calculate {a} + {b}.",
        "What do you get when you add {a} and {b}?",
        "Sum of {a} and {b}?",
        "{a} plus {b} is what?",
        "I have {a} coins and find {b} more. How many do I have?",
        "Compute {a} plus {b}.",
        "Tell me {a} plus {b}.",
        "What is the sum of {a} and {b}?",
        "How many are {a} and {b} together?",
        "How much do I get for {a} plus {b}?",
        "What does {a} + {b} make?",
        "{a} and {b} make how much?",
        "What do {a} and {b} make together?",
    ],
    [
        "Add {a} to {b}, will you?",
        "How much do {a} and {b} make?",
        "Work out {a} + {b}.",
        "What does {a} plus {b} give?",
    ],
    phrases=[
        "{a} plus {b}",
        "{a} + {b}",
        "the sum of {a} and {b}",
        "the result of {a} + {b}",
        "the total of {a} and {b}",
    ],
    orders=["add {a} and {b}", "add {a} to {b}", "calculate {a} + {b}", "work out {a} plus {b}", "sum {a} and {b}"],
)
_DIFF = Ways(
    [
        "What is {a} minus {b}?",
        "What is {a} - {b}?",
        "{a} - {b} = ?",
        "{a} - {b}",
        "Subtract {b} from {a}.",
        "How much is {a} minus {b}?",
        "What's {a}-{b}?",
        "Calculate {a} - {b}.",
        "Take {b} away from {a}.",
        "{a} minus {b} is what?",
        "Compute {a} minus {b}.",
        "I have {a} coins and lose {b}. How many are left?",
        "Tell me {a} minus {b}.",
        "What is the difference between {a} and {b}?",
        "What is left when you take {b} from {a}?",
        "How much is left of {a} after you take {b}?",
        "How much is {a} without {b}?",
        "What does {a} - {b} make?",
        "How many are {a} without {b}?",
    ],
    ["Work out {a} - {b}.", "How much is left of {a} without {b}?", "What does {a} minus {b} give?"],
    phrases=["{a} minus {b}", "{a} - {b}", "the difference of {a} and {b}", "the result of {a} - {b}", "{a} less {b}"],
    orders=[
        "subtract {b} from {a}",
        "take {b} from {a}",
        "calculate {a} - {b}",
        "work out {a} minus {b}",
        "take {b} away from {a}",
    ],
)


def arithmetic(rng: random.Random, test: bool) -> Turn:
    if rng.random() < 0.5:
        a = rng.randint(0, 20)
        b = rng.randint(0, 20 - a)
        ways, answer, result = _SUM, f"{a} plus {b} is {a + b}.", a + b
    else:
        a = rng.randint(0, 20)
        b = rng.randint(0, a)
        ways, answer, result = _DIFF, f"{a} minus {b} is {a - b}.", a - b
    words = not test and rng.random() < 0.1
    fields = {"a": p.NUMBER_WORDS[a], "b": p.NUMBER_WORDS[b]} if words else {"a": a, "b": b}
    turn = asked(rng, test, ways, fields, answer, f" {result}.")
    turn.user = cap(turn.user) if words else turn.user
    return turn


_NEXT = Ways(
    [
        "What {u} comes after {x}?",
        "Which {u} is after {x}?",
        "What is the {u} after {x}?",
        "What {u} follows {x}?",
        "Name the {u} after {x}.",
        "Tell me the next {u} after {x}.",
        "After {x}, which {u} comes?",
        "Which {u} follows {x}?",
    ],
    [
        "What is the next {u} when it is {x}?",
        "Which {u} comes directly after {x}?",
        "Please find the {u} that follows {x}.",
    ],
    phrases=["the {u} after {x}", "the next {u} after {x}", "the {u} that follows {x}", "the {u} that comes after {x}"],
)
_PREV = Ways(
    [
        "What {u} comes before {x}?",
        "Which {u} is before {x}?",
        "What is the {u} before {x}?",
        "What {u} precedes {x}?",
        "Name the {u} before {x}.",
        "Tell me the {u} just before {x}.",
        "Before {x}, which {u} comes?",
        "Which {u} precedes {x}?",
    ],
    ["Which {u} comes directly before {x}?", "Please find the {u} that precedes {x}."],
    phrases=[
        "the {u} before {x}",
        "the {u} just before {x}",
        "the {u} that precedes {x}",
        "the {u} that comes before {x}",
    ],
)
_NTH = Ways(
    [
        "What is the {n} {u} of the {w}?",
        "Which {u} is the {n} of the {w}?",
        "Name the {n} {u} of the {w}.",
        "Tell me the {n} {u} of the {w}.",
        "What is the name of the {n} {u} of the {w}?",
    ],
    ["Within the {w}, which {u} is the {n}?", "What is the {n} {u} in the {w} called?"],
    phrases=["the {n} {u} of the {w}", "the {n} {u} in the {w}", "the name of the {n} {u} of the {w}"],
)
_INDEX = Ways(
    [
        "Which number is {x} in the {w}?",
        "What number does {x} have in the {w}?",
        "Tell me the number of {x} in the {w}.",
        "Number of {x} in the {w}?",
        "What is the position of {x} in the {w}?",
    ],
    ["Which position has {x} in the {w}?", "What position does {x} have in the {w}?"],
    phrases=["the number of {x} in the {w}", "the position of {x} in the {w}", "the number of the {u} {x}"],
)
_LENGTH = Ways(
    [
        "How many days does {x} have?",
        "How many days are in {x}?",
        "How long is {x}, in days?",
        "Number of days in {x}?",
        "How many days has {x}?",
        "Tell me how many days {x} has.",
    ],
    ["What number of days does {x} have?", "How many days are there in {x}?"],
    phrases=["the number of days in {x}", "the length of {x} in days"],
)


def calendar(rng: random.Random, test: bool) -> Turn:
    unit, whole, names = rng.choice((("day", "week", p.DAYS), ("month", "year", p.MONTHS)))
    i = rng.randrange(len(names))
    x = names[i]
    kind = rng.randrange(5 if unit == "month" else 4)
    if kind == 0:
        y, ways, answer = names[(i + 1) % len(names)], _NEXT, "The {u} after {x} is {y}."
    elif kind == 1:
        y, ways, answer = names[i - 1], _PREV, "The {u} before {x} is {y}."
    elif kind == 2:
        y, ways, answer = x, _NTH, "The {n} {u} of the {w} is {y}."
    elif kind == 3:
        y, ways, answer = str(i + 1), _INDEX, "{x} is {u} number {y} of the {w}."
    else:
        y, ways, answer = str(p.MONTH_DAYS[i]), _LENGTH, "{x} has {y} days."
    fields = {"u": unit, "x": x, "n": p.ORDINALS[i], "w": whole, "y": y}
    return asked(rng, test, ways, fields, answer.format(**fields), y)


_OPPOSITE = Ways(
    [
        "What is the opposite of {x}?",
        "What's the opposite of {x}?",
        "Opposite of {x}?",
        "Tell me the opposite of {x}.",
        "Name the opposite of {x}.",
        "Which word is the opposite of {x}?",
        'What is the opposite of "{x}"?',
        "Give me the opposite of {x}.",
        "What word means the opposite of {x}?",
        "{x} and its opposite: what is it?",
        "I need the opposite of the word {x}.",
        "The opposite of {x} is?",
    ],
    ["Which word is opposite to {x}?", "Please find the opposite of {x}.", "Could you find the opposite of {x}?"],
    phrases=[
        "the opposite of {x}",
        "the opposite of the word {x}",
        'the opposite of "{x}"',
        "the word opposite to {x}",
        "a word that means the opposite of {x}",
    ],
)


def opposite(rng: random.Random, test: bool) -> Turn:
    pair = rng.choice(p.OPPOSITES)
    x, y = pair if rng.random() < 0.5 else pair[::-1]
    return asked(rng, test, _OPPOSITE, {"x": x}, f"The opposite of {x} is {y}.", y)


_SPELL = Ways(
    [
        "Spell {x}.",
        "How do you spell {x}?",
        "Spell the word {x}.",
        'Spell "{x}" letter by letter.',
        "Please spell {x}.",
        "What are the letters of {x}?",
        "Can you spell {x}?",
        "How is {x} spelled?",
        'How do I spell "{x}"?',
        "Write {x} letter by letter.",
        "How would you spell {x}?",
        "Which letters are in {x}?",
        "How do people spell the word {x}?",
        "Letter by letter, what is {x}?",
    ],
    ["How would you spell the word {x}?", "Which letters has the word {x}?", "How should I spell {x}?"],
    phrases=["the spelling of {x}", "the letters of {x}", "the letters of the word {x}", 'the spelling of "{x}"'],
    orders=[
        "spell {x}",
        "spell out {x}",
        "spell the word {x}",
        'spell "{x}"',
        "spell {x} letter by letter",
        "write the letters of {x}",
    ],
)


def spelling(rng: random.Random, test: bool) -> Turn:
    x = rng.choice(p.SPELL_WORDS)
    return asked(rng, test, _SPELL, {"x": x}, f"{x}: {'-'.join(x)}", "-".join(x))


_COUNT = Ways(
    [
        "Count from {a} to {b}.",
        "Please count from {a} to {b}.",
        "Can you count from {a} to {b}?",
        "Count {a} to {b}.",
        "List the numbers from {a} to {b}.",
        "Say the numbers from {a} to {b}.",
        "Write the numbers from {a} to {b}.",
        "Which numbers go from {a} to {b}?",
        "Start at {a} and count to {b}.",
    ],
    ["Give me all numbers from {a} to {b}.", "Please find all numbers from {a} to {b}."],
    orders=[
        "count from {a} to {b}",
        "count {a} to {b}",
        "list the numbers from {a} to {b}",
        "write all numbers from {a} to {b}",
        "give me the numbers from {a} to {b}",
    ],
)
# from 1, forwards or backwards
_COUNT_UP = Ways(
    [
        "Count to {b}.",
        "Count up to {b}.",
        "Count to {b}, please.",
        "Can you count to {b}?",
        "Do you know how to count to {b}?",
        "Count till {b}.",
        "How do you count to {b}?",
        "Count the numbers up to {b}.",
        "Let's count to {b}.",
    ],
    ["Would you count for me, up to {b}?", "I am glad if you count to {b}."],
    orders=["count to {b}", "count up to {b}", "count as far as {b}"],
)
_COUNT_DOWN = Ways(
    ["Count down from {b}.", "Count backwards from {b}.", "Count down from {b} to 1.", "Countdown from {b}."],
    ["Count from {b} down to 1.", "I am glad if you count down from {b}."],
    orders=["count down from {b}", "count backwards from {b}", "count down from {b} to one"],
)
_HOW_MANY = Ways(
    [
        "How many words are in this list: {l}?",
        "Count the words: {l}.",
        "How many things are these: {l}?",
        "Here is a list: {l}. How many words does it have?",
        "{l}: how many words is that?",
        "How many words do I say here: {l}?",
        "Count these: {l}.",
        "Please count the words: {l}.",
        "How many words can you see: {l}?",
        "Count how many words these are: {l}.",
    ],
    ["Count these words for me: {l}.", "How many words do you see here: {l}?"],
)


def _counted(rng: random.Random, test: bool, ways: Ways, a: int, b: int) -> Turn:
    numbers = range(a, b + 1) if b > a else range(a, b - 1, -1)
    answer = ", ".join(map(str, numbers)) + "."
    fields: dict[str, object] = {"b": a} if ways is _COUNT_DOWN else {"a": a, "b": b}
    if (not test or ways is not _COUNT) and max(a, b) <= 20 and rng.random() < 0.5:
        fields = {k: p.NUMBER_WORDS[int(str(v))] for k, v in fields.items()}
    return asked(rng, test, ways, fields, answer, answer)


def counting_to(rng: random.Random, test: bool) -> Turn:
    """From one up to a number, or from a number back to one."""
    if rng.random() < 0.7:
        return _counted(rng, test, _COUNT_UP, 1, rng.randint(2, 20))
    return _counted(rng, test, _COUNT_DOWN, rng.randint(2, 15), 1)


def counting(rng: random.Random, test: bool) -> Turn:
    r = rng.random()
    if r < 0.3:
        words = rng.sample(p.NOUNS, rng.randint(2, 7))
        return asked(rng, test, _HOW_MANY, {"l": ", ".join(words)}, f"There are {len(words)} words.", f" {len(words)} ")
    if r < 0.6 and not test:
        return counting_to(rng, test)
    a, n = rng.randint(0, 40), rng.randint(2, 12)
    return _counted(rng, test, _COUNT, *((a + n, a) if rng.random() < 0.25 else (a, a + n)))


FACTS = [(capital, 0.40), (arithmetic, 0.17), (calendar, 0.13), (opposite, 0.1), (spelling, 0.09), (counting, 0.11)]


def fact(rng: random.Random, test: bool) -> Turn:
    return rng.choices([f for f, _ in FACTS], [w for _, w in FACTS])[0](rng, test)
