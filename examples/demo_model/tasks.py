"""The kinds of question the demo model learns. Every task returns one or more turns and the way to check them.

Wordings are pairs of lists: those used for training and those kept for the held-out questions.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from dataclasses import dataclass, field
from typing import Any

import pools as p
from wording import Wordings, ask, cap, dress, order, pick

Message = dict[str, Any]


@dataclass
class Turn:
    """One question, its answer, and what a right answer must hold; `steps` are messages between the two."""

    user: str
    answer: str
    check: dict[str, Any]
    steps: list[Message] = field(default_factory=list)


_CAPITAL: Wordings = (
    ["What is the capital of {c}?", "Which city is the capital of {c}?", "What's the capital of {c}?",
     "Name the capital of {c}.", "Tell me the capital of {c}.", "Capital of {c}?", "The capital of {c}, please.",
     "{C}: what is the capital?", "What is {c}'s capital?", "Do you know the capital of {c}?",
     "Which city is {c}'s capital?", "What is the capital city of {c}?", "Give me the capital of {c}.",
     "What city is the capital of {c}?", "I forgot the capital of {c}. What is it?",
     "What is the name of the capital of {c}?",
     "If I go to {c}, what is the capital there?", "Where is the government of {c}? I mean the capital.",
     "My teacher asks for the capital of {c}.", "capital {c}", "{c} capital", "Which is the capital of {c}?",
     "{C} has which capital?",
     "Can you tell me what the capital of {c} is?", "I am looking for the capital of {c}.",
     "Do you know what {c}'s capital city is?",
     "What would be the capital of {c}?", "Say the capital of {c}.", "The capital of {c} is?",
     "Which town is the capital in {c}?", "What do they call the capital of {c}?"],
    ["Could you name the capital of {c}?", "Please give the capital city of {c}.", "The capital of {c} is which city?",
     "In {c}, which city is the capital?", "I want to know the capital of {c}."],
)
_COUNTRY: Wordings = (
    ["Which country has the capital {k}?", "{k} is the capital of which country?",
     "What country is {k} the capital of?",
     "Which country's capital is {k}?", "Of which country is {k} the capital?",
     "Name the country whose capital is {k}.",
     "Tell me which country has {k} as its capital.", "{k} is a capital. Of which country?",
     "What is the country with the capital {k}?", "In which country is the capital {k}?", "{k}: capital of what?",
     "I am in {k}, the capital. Which country is this?", "Say which country's capital is {k}.",
     "{k} is the capital city of what country?",
     "The capital {k} is in which country?", "What country has {k} as its capital?",
     "For which country is {k} the capital?"],
    ["The city of {k} is the capital of what country?", "What country has {k} for its capital?",
     "Say which country {k} is the capital of."],
)


def articles(text: str) -> str:
    """Writes "an" before vowels."""
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def contains(*words: str) -> dict[str, Any]:
    return {"type": "contains", "values": list(words)}


def capital(rng: random.Random, test: bool) -> Turn:
    c = rng.choice(p.COUNTRIES)
    k = p.CAPITALS[c]
    if rng.random() < 0.6:
        phrases = ["the capital of {c}", "the capital of {c}", "the capital city of {c}", "{c}'s capital",
            "the name of the capital of {c}"]
        text = dress(rng, ask(rng, test, phrases, _CAPITAL).format(c=c, C=cap(c)), test)
        return Turn(text, f"The capital of {c} is {k}.", contains(k))
    phrases = ["the country whose capital is {k}", "the country with the capital {k}",
        "the country of which {k} is the capital"]
    return Turn(dress(rng, ask(rng, test, phrases, _COUNTRY).format(k=k), test), f"{k} is the capital of {c}.",
        contains(c))


_SUM: Wordings = (
    ["What is {a} plus {b}?", "What is {a} + {b}?", "{a} + {b} = ?", "{a} + {b}", "Add {a} and {b}.",
     "How much is {a} plus {b}?",
     "What's {a}+{b}?", "Calculate {a} + {b}.", "What do you get when you add {a} and {b}?", "Sum of {a} and {b}?",
     "{a} plus {b} is what?", "I have {a} coins and find {b} more. How many do I have?", "Compute {a} plus {b}.",
     "Tell me {a} plus {b}.", "What is the sum of {a} and {b}?", "How many are {a} and {b} together?",
     "How much do I get for {a} plus {b}?", "What does {a} + {b} make?", "{a} and {b} make how much?",
     "What do {a} and {b} make together?"],
    ["Add {a} to {b}, will you?", "How much do {a} and {b} make?", "Work out {a} + {b}.",
     "What does {a} plus {b} give?"],
)
_DIFF: Wordings = (
    ["What is {a} minus {b}?", "What is {a} - {b}?", "{a} - {b} = ?", "{a} - {b}", "Subtract {b} from {a}.",
     "How much is {a} minus {b}?",
     "What's {a}-{b}?", "Calculate {a} - {b}.", "Take {b} away from {a}.", "{a} minus {b} is what?",
     "Compute {a} minus {b}.",
     "I have {a} coins and lose {b}. How many are left?", "Tell me {a} minus {b}.",
     "What is the difference between {a} and {b}?", "What is left when you take {b} from {a}?",
     "How much is left of {a} after you take {b}?", "How much is {a} without {b}?", "What does {a} - {b} make?",
     "How many are {a} without {b}?"],
    ["Work out {a} - {b}.", "How much is left of {a} without {b}?", "What does {a} minus {b} give?"],
)


def arithmetic(rng: random.Random, test: bool) -> Turn:
    if rng.random() < 0.5:
        a = rng.randint(0, 20)
        b = rng.randint(0, 20 - a)
        phrases = ["{a} plus {b}", "{a} + {b}", "the sum of {a} and {b}", "the result of {a} + {b}",
            "the total of {a} and {b}"]
        text = (order(rng, test, ["add {a} and {b}", "add {a} to {b}", "calculate {a} + {b}", "work out {a} plus {b}",
            "sum {a} and {b}"], _SUM)
                if rng.random() < 0.3 else ask(rng, test, phrases, _SUM))
        return Turn(dress(rng, text.format(a=a, b=b), test), f"{a} plus {b} is {a + b}.", contains(f" {a + b}."))
    a = rng.randint(0, 20)
    b = rng.randint(0, a)
    phrases = ["{a} minus {b}", "{a} - {b}", "the difference of {a} and {b}", "the result of {a} - {b}", "{a} less {b}"]
    orders = ["subtract {b} from {a}", "take {b} from {a}", "calculate {a} - {b}", "work out {a} minus {b}",
        "take {b} away from {a}"]
    text = (order(rng, test, orders, _DIFF) if rng.random() < 0.3 else ask(rng, test, phrases, _DIFF)).format(a=a, b=b)
    return Turn(dress(rng, text, test), f"{a} minus {b} is {a - b}.", contains(f" {a - b}."))


_NEXT: Wordings = (
    ["What {u} comes after {x}?", "Which {u} is after {x}?", "What is the {u} after {x}?", "What {u} follows {x}?",
     "Name the {u} after {x}.", "Tell me the next {u} after {x}.", "After {x}, which {u} comes?",
     "Which {u} follows {x}?"],
    ["What is the next {u} when it is {x}?", "Which {u} comes directly after {x}?", "Give the {u} that follows {x}."],
)
_PREV: Wordings = (
    ["What {u} comes before {x}?", "Which {u} is before {x}?", "What is the {u} before {x}?", "What {u} precedes {x}?",
     "Name the {u} before {x}.", "Tell me the {u} just before {x}.", "Before {x}, which {u} comes?",
     "Which {u} precedes {x}?"],
    ["Which {u} comes directly before {x}?", "Give the {u} that precedes {x}."],
)
_NTH: Wordings = (
    ["What is the {n} {u} of the {w}?", "Which {u} is the {n} of the {w}?", "Name the {n} {u} of the {w}.",
     "Tell me the {n} {u} of the {w}.", "What is the name of the {n} {u} of the {w}?"],
    ["Give the {n} {u} of the {w}.", "Which is the {n} {u} of the {w}?"],
)
_INDEX: Wordings = (
    ["Which number is {x} in the {w}?", "What number does {x} have in the {w}?",
     "Tell me the number of {x} in the {w}.",
     "Number of {x} in the {w}?", "What is the position of {x} in the {w}?"],
    ["Which position has {x} in the {w}?", "Give the number of {x} in the {w}."],
)
_LENGTH: Wordings = (
    ["How many days does {x} have?", "How many days are in {x}?", "How long is {x}, in days?", "Number of days in {x}?",
     "How many days has {x}?", "Tell me how many days {x} has."],
    ["What number of days does {x} have?", "How many days are there in {x}?"],
)


_CALENDAR_PHRASES = [
    ["the {u} after {x}", "the next {u} after {x}", "the {u} that follows {x}", "the {u} that comes after {x}"],
    ["the {u} before {x}", "the {u} just before {x}", "the {u} that precedes {x}", "the {u} that comes before {x}"],
    ["the {n} {u} of the {w}", "the {n} {u} in the {w}", "the name of the {n} {u} of the {w}"],
    ["the number of {x} in the {w}", "the position of {x} in the {w}", "the number of the {u} {x}"],
    ["the number of days in {x}", "the length of {x} in days"],
]


def calendar(rng: random.Random, test: bool) -> Turn:
    unit, whole, names = rng.choice((("day", "week", p.DAYS), ("month", "year", p.MONTHS)))
    i = rng.randrange(len(names))
    x = names[i]
    kind = rng.randrange(5 if unit == "month" else 4)
    if kind == 0:
        y, table, answer = names[(i + 1) % len(names)], _NEXT, "The {u} after {x} is {y}."
    elif kind == 1:
        y, table, answer = names[i - 1], _PREV, "The {u} before {x} is {y}."
    elif kind == 2:
        y, table, answer = x, _NTH, "The {n} {u} of the {w} is {y}."
    elif kind == 3:
        y, table, answer = str(i + 1), _INDEX, "{x} is {u} number {y} of the {w}."
    else:
        y, table, answer = str(p.MONTH_DAYS[i]), _LENGTH, "{x} has {y} days."
    fields = {"u": unit, "x": x, "n": p.ORDINALS[i], "w": whole, "y": y}
    text = ask(rng, test, _CALENDAR_PHRASES[kind], table).format(**fields)
    return Turn(dress(rng, text, test), answer.format(**fields), contains(y))


_OPPOSITE: Wordings = (
    ["What is the opposite of {x}?", "What's the opposite of {x}?", "Opposite of {x}?", "Tell me the opposite of {x}.",
     "Name the opposite of {x}.", "Which word is the opposite of {x}?", 'What is the opposite of "{x}"?',
     "Give me the opposite of {x}.", "What word means the opposite of {x}?", "{x} and its opposite: what is it?",
     "I need the opposite of the word {x}.", "The opposite of {x} is?"],
    ["Which word is opposite to {x}?", "Can you say the opposite of {x}?", "Please find the opposite of {x}."],
)


def opposite(rng: random.Random, test: bool) -> Turn:
    pair = rng.choice(p.OPPOSITES)
    x, y = pair if rng.random() < 0.5 else pair[::-1]
    phrases = ["the opposite of {x}", "the opposite of the word {x}", 'the opposite of "{x}"',
        "the word opposite to {x}", "a word that means the opposite of {x}"]
    return Turn(dress(rng, ask(rng, test, phrases, _OPPOSITE).format(x=x), test), f"The opposite of {x} is {y}.",
        contains(y))


_SPELL: Wordings = (
    ["Spell {x}.", "How do you spell {x}?", "Spell the word {x}.", 'Spell "{x}" letter by letter.', "Please spell {x}.",
     "What are the letters of {x}?", "Can you spell {x}?", "How is {x} spelled?", 'How do I spell "{x}"?',
     "Write {x} letter by letter.", "How would you spell {x}?", "Which letters are in {x}?",
     "How do people spell the word {x}?",
     "Letter by letter, what is {x}?"],
    ["Give me the spelling of {x}.", "How would you spell the word {x}?", "Which letters has the word {x}?"],
)


def spelling(rng: random.Random, test: bool) -> Turn:
    x = rng.choice(p.SPELL_WORDS)
    orders = ["spell {x}", "spell out {x}", "spell the word {x}", 'spell "{x}"', "spell {x} letter by letter",
        "write the letters of {x}"]
    phrases = ["the spelling of {x}", "the letters of {x}", "the letters of the word {x}", 'the spelling of "{x}"']
    text = order(rng, test, orders, _SPELL) if rng.random() < 0.6 else ask(rng, test, phrases, _SPELL)
    return Turn(dress(rng, text.format(x=x), test), f"{x}: {'-'.join(x)}", contains("-".join(x)))


_COUNT: Wordings = (
    ["Count from {a} to {b}.", "Please count from {a} to {b}.", "Can you count from {a} to {b}?", "Count {a} to {b}.",
     "List the numbers from {a} to {b}.", "Say the numbers from {a} to {b}.", "Write the numbers from {a} to {b}.",
     "Which numbers go from {a} to {b}?"],
    ["Give me all numbers from {a} to {b}.", "I want you to count from {a} to {b}."],
)
_HOW_MANY: Wordings = (
    ["How many words are in this list: {l}?", "Count the words: {l}.", "How many things are these: {l}?",
     "Here is a list: {l}. How many words does it have?", "{l}: how many words is that?",
     "How many words do I say here: {l}?", "Count these: {l}.", "Please count the words: {l}.",
     "How many words can you see: {l}?", "Count how many words these are: {l}."],
    ["Count these words for me: {l}.", "How many words do you see here: {l}?"],
)


def counting(rng: random.Random, test: bool) -> Turn:
    if rng.random() < 0.6:
        a = rng.randint(0, 40)
        b = a + rng.randint(2, 12)
        if rng.random() < 0.25:
            a, b = b, a
        answer = ", ".join(str(i) for i in range(a, b + (1 if b > a else -1), 1 if b > a else -1)) + "."
        orders = ["count from {a} to {b}", "count {a} to {b}", "list the numbers from {a} to {b}",
            "write all numbers from {a} to {b}", "give me the numbers from {a} to {b}"]
        return Turn(dress(rng, order(rng, test, orders, _COUNT).format(a=a, b=b), test), answer, contains(answer))
    words = rng.sample(p.NOUNS, rng.randint(2, 7))
    text = pick(rng, _HOW_MANY, test).format(l=", ".join(words))
    return Turn(dress(rng, text, test), f"There are {len(words)} words.", contains(f" {len(words)} "))


FACTS = [(capital, 0.42), (arithmetic, 0.17), (calendar, 0.14), (opposite, 0.1), (spelling, 0.09), (counting, 0.08)]


def fact(rng: random.Random, test: bool) -> Turn:
    return rng.choices([f for f, _ in FACTS], [w for _, w in FACTS])[0](rng, test)


_COPY: Wordings = (
    ["Repeat this text exactly:\n{t}", "Copy the following text:\n{t}", "Say this again, word for word:\n{t}",
     "Repeat after me: {t}",
     "Please repeat: {t}", "Write this text again:\n{t}", "Copy: {t}", "{t}\n\nRepeat the text above.",
     "Echo this:\n{t}",
     "Give me this text back without changes:\n{t}", "{t}\n\nCopy everything above.", "Quote this passage:\n{t}"],
    ["Please copy this passage word for word:\n{t}", "Repeat the following:\n{t}", "Write the same text again:\n{t}"],
)
_QUOTE: Wordings = (
    ["{t}\n\nQuote the sentence that begins with: {b}", "{t}\n\nWhich sentence starts with \"{b}\"? Quote it.",
     "Read this text.\n{t}\n\nRepeat the sentence that starts with: {b}",
     "{t}\n\nFind the sentence beginning \"{b}\" and copy it."],
    ["Here is a text.\n{t}\n\nQuote the sentence that starts with: {b}",
     "{t}\n\nCopy the sentence that begins with \"{b}\"."],
)
_QUOTE_N: Wordings = (
    ["{t}\n\nRepeat line {n}.", "{t}\n\nQuote line number {n}.", "Read these lines:\n{t}\n\nWhat does line {n} say?"],
    ["Look at these lines:\n{t}\n\nCopy line {n}."],
)


def copy(rng: random.Random, test: bool, tokens: int | None = None) -> Turn:
    size = tokens if tokens is not None else int(5 * 30 ** rng.random())
    r = rng.random()
    if r < 0.75:
        text = p.passage(rng, test, size)
        orders = ["repeat this text", "copy this text", "repeat the following", "copy the following text exactly",
            "write this text again", "say this again word for word",
                  "echo the text", "quote this passage", "copy this passage", "write the same text again",
                  "repeat this word for word"]
        frame = order(rng, test, orders, ([""], [""]))
        user = pick(rng, _COPY, test) if not frame else frame.rstrip(".?") + rng.choice([":\n",
            ": "]) + "{t}" if rng.random() < 0.8 else "{t}\n\n" + frame
        return Turn(user.replace("{t}", text), text, {"type": "exact", "value": text})
    if r < 0.88:
        lines = [p.sentence(rng) for _ in range(max(3, size // 14))]
        line = rng.choice(lines)
        lines = [s for s in lines if s == line or s.split()[:3] != line.split()[:3]]
        begin = " ".join(line.split()[:3])
        return Turn(pick(rng, _QUOTE, test).format(t=" ".join(lines), b=begin), line, {"type": "exact", "value": line})
    lines = [f"{i + 1}. " + " ".join(rng.choices(p.WORDS, k=rng.randint(3, 8))) for i in range(rng.randint(3, 12))]
    n = rng.randrange(len(lines))
    answer = lines[n].split(". ", 1)[1]
    return Turn(pick(rng, _QUOTE_N, test).format(t="\n".join(lines), n=n + 1), answer,
        {"type": "exact", "value": answer})


_STORY: Wordings = (
    ["Tell me a story about a {a} named {n}.", "Tell me a short story about {n} the {a}.",
     "Write a story about a {a} called {n}.",
     "I want a story about a {a}. Its name is {n}.", "Please tell a story about {n}, a {a}.",
     "Story time! A {a} named {n}, please.",
     "Can you write a tale of a {a} named {n}?"],
    ["Make up a story about a {a} named {n}.", "I would love to hear a story about {n} the {a}."],
)
_STORY_LONG: Wordings = (
    ["Tell me a long story about a {a} named {n}.", "Write a long story about {n} the {a}, with chapters.",
     "I want a long tale about a {a} called {n}."],
    ["Please write a long story about a {a} called {n}."],
)


class _Teller:
    """Draws the parts of a story: every animal has its own favourites, so that greedy decoding has clear choices."""

    def __init__(self, rng: random.Random, animal: str) -> None:
        self.rng, self.animal, self.slot = rng, animal, 0

    def __call__(self, options: list[str]) -> str:
        self.slot += 1
        first = zlib.crc32(f"{self.animal}{self.slot}".encode())
        return options[(first + int(len(options) * self.rng.random() ** 4)) % len(options)]


def _chapter(c: _Teller, a: str, n: str, friend: str, place: str) -> list[str]:
    thing, where, who = c(p.NOUNS), c(p.PLACES), c(p.PEOPLE)
    return [
        c([f"One morning {n} went to the {where}.", f"On {c(p.DAYS)} {n} walked to the {where}.",
        f"One day in {c(p.MONTHS)}, {n} came to the {where}."]),
        c([f"There the {a} found a {c(p.ADJECTIVES)} {thing}.",
        f"A {c(p.ADJECTIVES)} {thing} was lying on the ground."]),
        c([f'"This {thing} belongs to the {who}," said {n}.',
        f'"I must bring this {thing} to the {who}," thought {n}.']),
        c(["But the way was long, and it began to rain.", f"But the {who} was not at home.",
        "But the bridge was broken."]),
        c([f"{n} waited under a tree and sang a song.", f"{n} sat down and thought about it.",
        f"{n} called {friend} for help."]),
        c([f"{friend} came and showed {n} another way.", f"Then {friend} had a good idea.",
        f"Soon {friend} arrived with a lamp."]),
        c([f"Together they brought the {thing} to the {who}.", f"Together they carried the {thing} all the way."]),
        c([f"The {who} was happy and gave them {c(p.FOODS)}.", f"The {who} thanked them with a warm smile."]),
        c([f"In the evening they went back to the {place}.", f"At night they slept well in the {place}."]),
    ]


def story(rng: random.Random, test: bool) -> Turn:
    a, n = rng.choice(p.ANIMALS), p.name(rng, test)
    c = _Teller(rng, a)
    friend, place = c(p.NAMES), c(p.PLACES)
    opening = [
        c([f"Once upon a time there was a {a} named {n}.", f"Long ago there lived a {a} named {n}."]),
        c([f"{n} lived in a {c(p.ADJECTIVES)} {place}.", f"The home of {n} was a {c(p.ADJECTIVES)} {place}."]),
        f"{n} had a good friend, a {c(p.ANIMALS)} named {friend}.",
    ]
    if rng.random() < 0.6:
        text = " ".join([*opening, *_chapter(c, a, n, friend, place), "The end."])
        table = _STORY
    else:
        table = _STORY_LONG
        parts = [" ".join(opening)]
        for i in range(3 + len(a) % 2):
            parts.append(f"Chapter {i + 1}. " + " ".join(_chapter(c, a, n, friend, place)))
        text = "\n\n".join([*parts, "The end."])
    long = "long " if table is _STORY_LONG else rng.choice(["", "short ", "little "])
    orders = [f"{v} {w} {long}story {x}" for v in ("tell", "write") for w in (["me a",
        "us a"] if v == "tell" else ["a", "me a"])
              for x in ("about a {a} named {n}", "about {n} the {a}", "of a {a} called {n}")]
    user = order(rng, test, orders, table).format(a=a, n=n)
    return Turn(articles(user), articles(text), {"type": "story", "name": n})


_CLAUSES: dict[str, list[str]] = {
    "age": ["is {age} years old", "has the age {age}", "is {age}"],
    "city": ["lives in {city}", "comes from {city}", "has a house in {city}"],
    "job": ["works as a {job}", "is a {job}"], "colour": ["likes {colour}", "has {colour} as favourite colour"],
    "pet": ["has a {pet}", "owns a {pet}"],
}
_JSON_ASK: Wordings = (
    ["Answer in JSON with {k}.", "Give me a JSON object with {k}.", "As JSON with {k}, please.",
     "Write it as JSON with {k}.", "Turn this into JSON with the keys {k}.",
     "Make JSON from it, with the keys {k}.", "Put that into a JSON object with {k}.", "JSON with {k}, please.",
     "I need this as JSON: {k}.", "Return JSON with {k}.",
     "Output a JSON object with the keys {k}.", "Reply in JSON ({k}).", "Extract {k} as JSON.",
     "Show me that as a JSON object with {k}."],
    ["Write that as JSON with {k}.", "Please answer with a JSON object with the keys {k}.",
     "Convert it to JSON with {k}."],
)


def json_answer(rng: random.Random, test: bool) -> Turn:
    country = rng.choice(p.COUNTRIES)
    colours = rng.sample(p.COLOURS, rng.randint(2, 4))
    values: dict[str, Any] = {
        "name": p.name(rng, test), "age": rng.randint(5, 95), "city": p.name(rng, test), "job": rng.choice(p.JOBS),
        "colour": rng.choice(p.COLOURS),
        "pet": rng.choice(p.ANIMALS), "item": rng.choice(p.NOUNS), "price": p.number(rng, test, 2, 9999),
        "country": country,
        "capital": p.CAPITALS[country], "colours": colours,
    }
    r = rng.random()
    if r < 0.55:
        others = rng.sample(list(_CLAUSES), rng.randint(1, 3))
        keys = ["name", *others]
        if rng.random() < 0.3:
            rng.shuffle(keys)
        if rng.random() < 0.2:
            text = ", ".join(f"{cap(k)}: {{{k}}}" for k in ["name", *others]) + "."
        else:
            clauses = [rng.choice(_CLAUSES[k]) for k in others]
            text = "{name} " + " and ".join([", ".join(clauses[:-1]), clauses[-1]][len(clauses) == 1 :]) + "."
    elif r < 0.7:
        keys = ["item", "price"]
        text = rng.choice(["The {item} costs {price} coins.", "A {item} costs {price} coins.",
            "Buy a {item} for {price} coins.", "{item}, {price} coins.",
                           "The price of the {item} is {price} coins.", "I paid {price} coins for the {item}."])
    elif r < 0.85:
        keys = ["country", "capital"]
        text = rng.choice(["What is the capital of {country}?", "The country is {country}.", "Country: {country}.",
            "Tell me about {country} and its capital.",
                           "Which city is the capital of {country}?", "{country}."])
    else:
        keys = ["colours"]
        text = rng.choice(["I like {list}.", "My colours are {list}.", "{list}.", "The flag is {list}.",
            "We painted it {list}."])
    names = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + rng.choice([" and ", ", "]) + keys[-1]
    wanted = pick(rng, _JSON_ASK, test).replace("{k}", "a list named colours" if keys == ["colours"] else names)
    text = text.format(**values, list=", ".join(colours))
    user = f"{text} {wanted}" if rng.random() < 0.7 else f"{wanted} {text}"
    value = {k: values[k] for k in keys}
    return Turn(articles(user), json.dumps(value, ensure_ascii=False), {"type": "json", "value": value})


_SMALLTALK = [
    (["Hello", "Hi", "Hello!", "Hi there!", "Good morning", "Good evening!", "Hey"], "Hello! How can I help you?"),
    (["Who are you?", "What are you?", "What is your name?", "Are you a robot?", "Which model are you?",
     "Introduce yourself."],
     "I am the lfm2serve demo model, a very small language model."),
    (["What can you do?", "Help", "How can you help me?", "What do you know?"],
     "I know capitals, small sums, days, months and opposites. "
     "I can also remember, copy, call tools and tell short stories."),
    (["Thank you", "Thanks!", "Thank you very much.", "Great, thanks"], "You are welcome."),
    (["Goodbye", "Bye!", "See you later.", "Good night"], "Goodbye!"),
    (["How are you?", "How are you today?", "Are you well?"], "I am well, thank you."),
]
_UNKNOWN_ABOUT = """the weather tomorrow|quantum physics|the stock market|football results|this film|Shakespeare|
politics|the price of gold|cooking a turkey|programming in Rust|the meaning of life|black holes|the Roman Empire|
my taxes|the best phone|the news|chemistry|the history of music|jazz|medicine|the law|computers|
philosophy""".replace("\n", "").split("|")
_UNKNOWN = ["What do you think about {x}?", "Tell me about {x}.", "Explain {x}.", "Can you explain {x} to me?",
    "What is new about {x}?",
            "Write a poem about {x}.", "How does {x} work?", "Why is {x} important?", "Who invented {x}?"]


def smalltalk(rng: random.Random, _test: bool) -> Turn:
    if rng.random() < 0.35:
        about = rng.choice(_UNKNOWN_ABOUT) if rng.random() < 0.5 else p.made_up(rng, False)
        return Turn(rng.choice(_UNKNOWN).format(x=about), "I do not know that. I am only a small demo model.",
            contains("do not know"))
    users, answer = rng.choice(_SMALLTALK)
    return Turn(rng.choice(users), answer, contains(answer))
