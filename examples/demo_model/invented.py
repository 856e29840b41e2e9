"""Invented tools: names, parameters and questions that must be read from the list of tools, and boxes of several."""

from __future__ import annotations

import random
from typing import Any

import pools as p
from tools import KNOWN, Args, Entry, Toolbox, Use, schema
from wording import Ways

_READ_VERBS = [
    "get",
    "find",
    "read",
    "check",
    "fetch",
    "show",
    "query",
    "search",
    "list",
    "count",
    "measure",
    "compute",
    "estimate",
    "look_up",
]
_DO_VERBS = [
    "create",
    "add",
    "open",
    "close",
    "start",
    "stop",
    "update",
    "delete",
    "move",
    "send",
    "rename",
    "order",
    "repair",
    "clean",
    "paint",
    "lock",
    "unlock",
    "print",
    "save",
    "load",
    "copy",
    "check",
    "book",
    "cancel",
    "reserve",
    "install",
    "remove",
    "pack",
    "paint",
    "sort",
    "mark",
    "share",
    "hide",
    "play",
    "pause",
    "reset",
    "schedule",
    "assign",
    "deliver",
    "connect",
    "enable",
    "disable",
]
_THINGS = [
    *p.NOUNS,
    *[
        "user",
        "account",
        "invoice",
        "sensor",
        "device",
        "file",
        "task",
        "project",
        "room",
        "event",
        "ticket",
        "server",
        "product",
        "customer",
        "session",
        "playlist",
        "robot",
        "printer",
        "alarm",
        "parcel",
        "recipe",
        "contract",
        "report",
        "folder",
        "backup",
        "network",
        "database",
        "flight",
        "seat",
        "warehouse",
        "shipment",
    ],
]
_PROPS = [
    *[
        "price",
        "size",
        "colour",
        "weight",
        "status",
        "owner",
        "address",
        "level",
        "length",
        "name",
        "amount",
        "height",
        "speed",
        "date",
        "rating",
        "value",
        "temperature",
        "balance",
        "distance",
        "score",
        "count",
        "position",
        "volume",
    ],
    *p.NOUNS,
]
_PARAMS: dict[str, list[str]] = {
    "string": [
        "name",
        "title",
        "owner",
        "colour",
        "label",
        "city",
        "note",
        "place",
        "format",
        "category",
        "unit",
        "target",
        "kind",
        "person",
    ],
    "integer": [
        "id",
        "number",
        "amount",
        "count",
        "level",
        "size",
        "page",
        "limit",
        "year",
        "minutes",
        "floor",
        "quantity",
    ],
    "number": ["weight", "price", "ratio", "speed", "height", "factor", "distance", "width"],
    "boolean": ["urgent", "express", "active", "public", "visible", "silent", "recursive"],
}

# The question names what the tool's name says; {w}: what is given, one parameter or several
_READ = Ways(
    [
        "What is the {prop} of {noun} {w}?",
        "{Verb} the {prop} of {noun} {w}.",
        "Tell me the {prop} of {noun} {w}.",
        "{Verb} the {noun}'s {prop} for {w}.",
        "What {prop} does the {noun} {w} have?",
        "What's the {prop} of the {noun} with {w}?",
        "{Verb} {noun} {prop}: {w}.",
    ],
    ["Can you look up the {prop} of {noun} {w}?", "Which {prop} does the {noun} {w} have?"],
    phrases=[
        "the {prop} of {noun} {w}",
        "the {prop} of the {noun} {w}",
        "{noun} {w}'s {prop}",
        "the {prop} of the {noun} with {w}",
        "the {noun} {prop} for {w}",
    ],
)
_DO = Ways(
    [
        "{Verb} the {noun} with {w}.",
        "{Verb} a {noun}: {w}.",
        "{Verb} {noun}, {w}.",
        "Please {verb} the {noun}, {w}.",
        "{Verb} the {noun} {w}.",
        "I need to {verb} a {noun} with {w}.",
    ],
    ["I have to {verb} the {noun} with {w}.", "We need to {verb} a {noun} with {w}."],
    orders=["{verb} the {noun} with {w}", "{verb} a {noun} with {w}", "{verb} {noun} {w}", "{verb} the {noun}: {w}"],
)
_BY_NAME = Ways(
    [
        "Use {tool} with {w}.",
        "Call {tool} with {w}.",
        "Tool {tool}: {w}",
        "Run {tool} with {w}.",
        "Please call {tool}, {w}.",
    ],
    ["Make use of {tool} with {w}.", "I need a call of {tool} with {w}."],
    orders=["use {tool} with {w}", "call {tool} with {w}", "run the tool {tool} with {w}"],
)
# the tools of the first training: one parameter, named as the thing is
_PLAIN = Ways(
    ["What is the {prop} of {noun} {w}?", "{Verb} the {prop} of {noun} {w}.", "Tell me the {prop} of {noun} {w}."],
    ["Can you look up the {prop} of {noun} {w}?", "Could you find the {prop} of {noun} {w}?"],
    phrases=["the {prop} of {noun} {w}", "the {prop} of the {noun} {w}", "{noun} {w}'s {prop}"],
)


def _value(rng: random.Random, test: bool, kind: str) -> Any:
    if kind == "integer":
        return p.number(rng, test, 2, 9999)
    if kind == "number":
        return p.number(rng, test, 11, 9999) / 10
    if kind == "boolean":
        return rng.random() < 0.5
    r = rng.random()
    if r < 0.6:
        return p.name(rng, test)
    if r < 0.75:
        return p.made_up(rng, test)
    if r < 0.9:
        return " ".join(rng.sample(p.WORDS, rng.randint(1, 3)))
    return f"{''.join(rng.choices('ABCDEFGHKLMNPRSTXZ', k=2))}-{p.number(rng, test, 10, 999)}"


def _said(rng: random.Random, args: Args) -> str:
    """The arguments as a question names them."""
    parts = []
    for name, value in args.items():
        name = name.replace("_", " ")
        shown = {True: "true", False: "false"}[value] if isinstance(value, bool) else value
        parts.append(rng.choice([f"{name} {shown}", f"{name} {shown}", f"the {name} {shown}", f"{name} = {shown}"]))
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def plain(rng: random.Random) -> Entry:
    """A tool verb_noun_prop with one parameter, which is called as the noun."""
    noun, prop = rng.sample(p.NOUNS, 2)
    verb, kind = rng.choice(["get", "find", "read", "check"]), rng.choice(["string", "integer"])

    def make(r: random.Random, t: bool) -> Use:
        value: Any = p.name(r, t) if kind == "string" else p.number(r, t, 2, 9999)
        result = p.number(r, t, 2, 9999)
        return Use(
            {noun: value},
            {prop: result},
            f"The {prop} of {noun} {value} is {result}.",
            {"w": value, "noun": noun, "prop": prop, "Verb": verb.capitalize()},
        )

    return Entry(schema(f"{verb}_{noun}_{prop}", f"The {prop} of a {noun}", **{noun: kind}), make, _PLAIN)


def _tool_name(rng: random.Random, *words: str) -> str:
    words = tuple("_".join(words).split("_"))
    if rng.random() < 0.15:
        return words[0] + "".join(w.capitalize() for w in words[1:])
    return "_".join(words)


def reader(rng: random.Random, noun: str, prop: str) -> Entry:
    """A tool that returns a property of a thing, chosen by one to three parameters."""
    verb = rng.choice(_READ_VERBS)
    parameters = _parameters(rng, noun)
    name = _tool_name(
        rng, *rng.choice([(verb, noun, prop), (verb, noun, prop), (noun, prop), (verb, prop, "of", noun)])
    )
    spoken = verb.replace("_", " ")

    def make(r: random.Random, t: bool) -> Use:
        args = {k: _value(r, t, kind) for k, kind in parameters.items()}
        result: Any = p.number(r, t, 2, 99999) if r.random() < 0.7 else p.name(r, t)
        alone = len(args) == 1 and not isinstance(next(iter(args.values())), bool)
        w = (
            str(next(iter(args.values())))
            if (alone and noun in args) or (alone and r.random() < 0.5)
            else _said(r, args)
        )
        return Use(
            args,
            {prop: result},
            f"The {prop} is {result}.",
            {"w": w, "noun": noun, "prop": prop, "Verb": spoken.capitalize(), "tool": name},
        )

    description = rng.choice(
        [
            f"The {prop} of a {noun}",
            f"Returns the {prop} of a {noun}",
            f"{spoken.capitalize()}s the {prop} of a {noun}",
            f"{prop} of the {noun}",
        ]
    )
    return Entry(schema(name, description, **parameters), make, _BY_NAME if rng.random() < 0.15 else _READ)


def doer(rng: random.Random, noun: str, verb: str) -> Entry:
    """A tool that does something to a thing."""
    parameters = _parameters(rng, noun)
    name = _tool_name(rng, verb, noun)

    def make(r: random.Random, t: bool) -> Use:
        args = {k: _value(r, t, kind) for k, kind in parameters.items()}
        number = p.number(r, t, 2, 9999)
        result, answer = r.choice(
            [
                ({"status": "done"}, "It is done."),
                ({"ok": True}, "It is done."),
                ({"number": number}, f"It is done, number {number}."),
                ({"id": number}, f"It is done, number {number}."),
            ]
        )
        return Use(
            args,
            result,
            answer,
            {"w": _said(r, args), "noun": noun, "verb": verb, "Verb": verb.capitalize(), "tool": name},
        )

    description = rng.choice([f"{verb.capitalize()}s a {noun}", f"{verb.capitalize()} a {noun}"])
    return Entry(schema(name, description, **parameters), make, _BY_NAME if rng.random() < 0.2 else _DO)


def _parameters(rng: random.Random, noun: str) -> dict[str, str]:
    out: dict[str, str] = {}
    for i in range(rng.choice([1, 1, 1, 2, 2, 3])):
        kind = rng.choices(list(_PARAMS), (5, 4, 2, 1 if i else 0))[0]
        name = rng.choice(_PARAMS[kind])
        if i == 0 and rng.random() < 0.5:
            name = rng.choice([noun, f"{noun}_{name}", f"{noun}_id"])
        elif rng.random() < 0.1:
            name = rng.choice(p.NOUNS)
        out.setdefault(name, kind)
    return out


def family(rng: random.Random, n: int) -> list[Entry]:
    """Invented tools that share words with each other, so that the whole name must be read."""
    noun, prop = rng.choice(_THINGS), rng.choice(_PROPS)
    out: dict[tuple[str, str], Entry] = {}
    while len(out) < n:
        thing = noun if rng.random() < 0.6 else rng.choice(_THINGS)
        if rng.random() < 0.55:
            what = prop if rng.random() < 0.3 else rng.choice(_PROPS)
            out.setdefault((thing, what), reader(rng, thing, what))
        else:
            verb = rng.choice(_DO_VERBS)
            out.setdefault((verb, thing), doer(rng, thing, verb))
    return list(out.values())


def old_box(rng: random.Random, test: bool) -> Toolbox:
    """Known tools and plain invented ones."""
    entries = [KNOWN[k] for k in rng.sample(list(KNOWN), rng.randint(0 if rng.random() < 0.3 else 1, 3))]
    while not entries or rng.random() < 0.3:
        entries.append(plain(rng))
    rng.shuffle(entries)
    return Toolbox(rng, test, entries)


def new_box(rng: random.Random, test: bool) -> Toolbox:
    """One to four invented tools, sometimes beside a known one."""
    entries = family(rng, rng.randint(1, 4))
    if rng.random() < 0.25:
        entries.append(KNOWN[rng.choice(list(KNOWN))])
    rng.shuffle(entries)
    return Toolbox(rng, test, entries)


def box(rng: random.Random, test: bool) -> Toolbox:
    return (old_box if rng.random() < 0.5 else new_box)(rng, test)
