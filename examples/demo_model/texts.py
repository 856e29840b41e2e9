"""Tasks on texts: copying and quoting, stories, JSON objects."""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

import pools as p
from tasks import Turn, articles
from wording import Ways, cap

_COPY = Ways(
    [
        "Repeat this text exactly:\n{t}",
        "Copy the following text:\n{t}",
        "Say this again, word for word:\n{t}",
        "Repeat after me: {t}",
        "Please repeat: {t}",
        "Write this text again:\n{t}",
        "Copy: {t}",
        "{t}\n\nRepeat the text above.",
        "Echo this:\n{t}",
        "Give me this text back without changes:\n{t}",
        "{t}\n\nCopy everything above.",
        "Quote this passage:\n{t}",
        "Repeat: {t}",
        "Say: {t}",
    ],
    [
        "Please copy this passage word for word:\n{t}",
        "Repeat all of the following:\n{t}",
        "Write once more the same text:\n{t}",
    ],
    orders=[
        "repeat this text",
        "copy this text",
        "repeat the following",
        "copy the following text exactly",
        "write this text again",
        "say this again word for word",
        "echo the text",
        "quote this passage",
        "copy this passage",
        "write the same text again",
        "repeat this word for word",
    ],
    around=["{f}:\n{t}", "{f}: {t}", "{t}\n\n{f}."],
)
_QUOTE = Ways(
    [
        "{t}\n\nQuote the sentence that begins with: {b}",
        '{t}\n\nWhich sentence starts with "{b}"? Quote it.',
        "Read this text.\n{t}\n\nRepeat the sentence that starts with: {b}",
        '{t}\n\nFind the sentence beginning "{b}" and copy it.',
    ],
    [
        "Here is a text.\n{t}\n\nQuote the sentence that starts with: {b}",
        '{t}\n\nCopy the sentence that begins with "{b}".',
    ],
)
_QUOTE_N = Ways(
    ["{t}\n\nRepeat line {n}.", "{t}\n\nQuote line number {n}.", "Read these lines:\n{t}\n\nWhat does line {n} say?"],
    ["Look at these lines:\n{t}\n\nCopy line {n}."],
)


def copy(rng: random.Random, test: bool, tokens: int | None = None) -> Turn:
    size = tokens if tokens is not None else int(5 * 30 ** rng.random())
    r = rng.random()
    if r < 0.75:
        text = p.passage(rng, test, size)
        wording = _COPY.draw(rng, test)
        return Turn(wording.replace("{t}", text), text, {"type": "exact", "value": text}, wording=wording)
    if r < 0.88:
        lines = [p.sentence(rng) for _ in range(max(3, size // 14))]
        line = rng.choice(lines)
        lines = [s for s in lines if s == line or s.split()[:3] != line.split()[:3]]
        fields: dict[str, Any] = {"t": " ".join(lines), "b": " ".join(line.split()[:3])}
        ways, answer = _QUOTE, line
    else:
        lines = [f"{i + 1}. " + " ".join(rng.choices(p.WORDS, k=rng.randint(3, 8))) for i in range(rng.randint(3, 12))]
        n = rng.randrange(len(lines))
        fields = {"t": "\n".join(lines), "n": n + 1}
        ways, answer = _QUOTE_N, lines[n].split(". ", 1)[1]
    wording = ways.draw(rng, test)
    return Turn(wording.format(**fields), answer, {"type": "exact", "value": answer}, wording=wording)


def _story_orders(*kinds: str) -> list[str]:
    whom = {"tell": ["me a", "us a"], "write": ["a", "me a"]}
    return [
        f"{v} {w} {kind}story {x}"
        for kind in kinds
        for v, ws in whom.items()
        for w in ws
        for x in ("about a {a} named {n}", "about {n} the {a}", "of a {a} called {n}")
    ]


_STORY = Ways(
    [
        "Tell me a story about a {a} named {n}.",
        "Tell me a short story about {n} the {a}.",
        "Write a story about a {a} called {n}.",
        "I want a story about a {a}. Its name is {n}.",
        "Please tell a story about {n}, a {a}.",
        "Story time! A {a} named {n}, please.",
        "Can you write a tale of a {a} named {n}?",
        "A story about a {a} named {n}.",
        "A bedtime story about {n} the {a}!",
        "Do you know a story about a {a} named {n}?",
    ],
    ["Make up a story about a {a} named {n}.", "I would love to hear a story about {n} the {a}."],
    orders=_story_orders("", "short ", "little "),
)
_STORY_LONG = Ways(
    [
        "Tell me a long story about a {a} named {n}.",
        "Write a long story about {n} the {a}, with chapters.",
        "I want a long tale about a {a} called {n}.",
    ],
    ["Please write a long story about a {a} called {n}."],
    orders=_story_orders("long "),
)
_STORY_ANY = Ways(
    [
        "Tell me a story.",
        "Tell me a story about a {a}.",
        "Write a story about a {a}.",
        "I want a story about a {a}.",
        "A story about a {a}, please.",
        "Tell me something about a {a}.",
        "Once upon a time",
    ],
    [],
    orders=[
        "tell me a story",
        "tell me a story about a {a}",
        "write a story about a {a}",
        "write a short story about a {a}",
        "tell us a short story about a {a}",
    ],
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
        c(
            [
                f"One morning {n} went to the {where}.",
                f"On {c(p.DAYS)} {n} walked to the {where}.",
                f"One day in {c(p.MONTHS)}, {n} came to the {where}.",
            ]
        ),
        c(
            [
                f"There the {a} found a {c(p.ADJECTIVES)} {thing}.",
                f"A {c(p.ADJECTIVES)} {thing} was lying on the ground.",
            ]
        ),
        c(
            [
                f'"This {thing} belongs to the {who}," said {n}.',
                f'"I must bring this {thing} to the {who}," thought {n}.',
            ]
        ),
        c(
            [
                "But the way was long, and it began to rain.",
                f"But the {who} was not at home.",
                "But the bridge was broken.",
            ]
        ),
        c(
            [
                f"{n} waited under a tree and sang a song.",
                f"{n} sat down and thought about it.",
                f"{n} called {friend} for help.",
            ]
        ),
        c(
            [
                f"{friend} came and showed {n} another way.",
                f"Then {friend} had a good idea.",
                f"Soon {friend} arrived with a lamp.",
            ]
        ),
        c([f"Together they brought the {thing} to the {who}.", f"Together they carried the {thing} all the way."]),
        c([f"The {who} was happy and gave them {c(p.FOODS)}.", f"The {who} thanked them with a warm smile."]),
        c([f"In the evening they went back to the {place}.", f"At night they slept well in the {place}."]),
    ]


def story(rng: random.Random, test: bool) -> Turn:
    a, n = rng.choice(p.ANIMALS), p.name(rng, test)
    ways = rng.choices((_STORY, _STORY_LONG, _STORY_ANY), (0.55, 0.35, 0.0 if test else 0.1))[0]
    wording = ways.draw(rng, test)
    if ways is _STORY_ANY:
        a = a if "{a}" in wording else p.ANIMALS[0]
        n = p.NAMES[zlib.crc32(a.encode()) % len(p.NAMES)]
    c = _Teller(rng, a)
    friend, place = c(p.NAMES), c(p.PLACES)
    opening = [
        c([f"Once upon a time there was a {a} named {n}.", f"Long ago there lived a {a} named {n}."]),
        c([f"{n} lived in a {c(p.ADJECTIVES)} {place}.", f"The home of {n} was a {c(p.ADJECTIVES)} {place}."]),
        f"{n} had a good friend, a {c(p.ANIMALS)} named {friend}.",
    ]
    if ways is _STORY_LONG:
        parts = [" ".join(opening)]
        for i in range(3 + len(a) % 2):
            parts.append(f"Chapter {i + 1}. " + " ".join(_chapter(c, a, n, friend, place)))
        text = "\n\n".join([*parts, "The end."])
    else:
        text = " ".join([*opening, *_chapter(c, a, n, friend, place), "The end."])
    return Turn(articles(wording.format(a=a, n=n)), articles(text), {"type": "story", "name": n}, wording=wording)


_CLAUSES: dict[str, list[str]] = {
    "age": ["is {age} years old", "has the age {age}", "is {age}"],
    "city": ["lives in {city}", "comes from {city}", "has a house in {city}"],
    "job": ["works as a {job}", "is a {job}"],
    "colour": ["likes {colour}", "has {colour} as favourite colour"],
    "pet": ["has a {pet}", "owns a {pet}"],
}
_JSON = Ways(
    [
        "Answer in JSON with {k}.",
        "Give me a JSON object with {k}.",
        "As JSON with {k}, please.",
        "Write it as JSON with {k}.",
        "Turn this into JSON with the keys {k}.",
        "Make JSON from it, with the keys {k}.",
        "Put that into a JSON object with {k}.",
        "JSON with {k}, please.",
        "I need this as JSON: {k}.",
        "Return JSON with {k}.",
        "Output a JSON object with the keys {k}.",
        "Reply in JSON ({k}).",
        "Extract {k} as JSON.",
        "Show me that as a JSON object with {k}.",
    ],
    [
        "Write that as JSON with {k}.",
        "Please answer with a JSON object with the keys {k}.",
        "Convert it to JSON with {k}.",
    ],
)


def json_answer(rng: random.Random, test: bool) -> Turn:
    country = rng.choice(p.COUNTRIES)
    colours = rng.sample(p.COLOURS, rng.randint(2, 4))
    values: dict[str, Any] = {
        "name": p.name(rng, test),
        "age": rng.randint(5, 95),
        "city": p.name(rng, test),
        "job": rng.choice(p.JOBS),
        "colour": rng.choice(p.COLOURS),
        "pet": rng.choice(p.ANIMALS),
        "item": rng.choice(p.NOUNS),
        "price": p.number(rng, test, 2, 9999),
        "country": country,
        "capital": p.CAPITALS[country],
        "colours": colours,
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
        text = rng.choice(
            [
                "The {item} costs {price} coins.",
                "A {item} costs {price} coins.",
                "Buy a {item} for {price} coins.",
                "{item}, {price} coins.",
                "The price of the {item} is {price} coins.",
                "I paid {price} coins for the {item}.",
            ]
        )
    elif r < 0.85:
        keys = ["country", "capital"]
        text = rng.choice(
            [
                "What is the capital of {country}?",
                "The country is {country}.",
                "Country: {country}.",
                "Tell me about {country} and its capital.",
                "Which city is the capital of {country}?",
                "{country}.",
            ]
        )
    else:
        keys = ["colours"]
        text = rng.choice(
            ["I like {list}.", "My colours are {list}.", "{list}.", "The flag is {list}.", "We painted it {list}."]
        )
    names = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + rng.choice([" and ", ", "]) + keys[-1]
    wording = _JSON.draw(rng, test)
    wanted = wording.replace("{k}", "a list named colours" if keys == ["colours"] else names)
    text = text.format(**values, list=", ".join(colours))
    user = f"{text} {wanted}" if rng.random() < 0.7 else f"{wanted} {text}"
    value = {k: values[k] for k in keys}
    return Turn(
        articles(user), json.dumps(value, ensure_ascii=False), {"type": "json", "value": value}, wording=wording
    )
