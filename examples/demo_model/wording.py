"""Ways to ask and to tell, and the proof that the held-out ones are apart from those of the training chats.

A message is a noun phrase ("the capital of Peru"), an order ("count from 1 to 5") or a statement ("my name is Ada")
in a frame, or one of the task's own templates. Frames are shared by all tasks, so that the model learns to read the
phrase and not the frame. Each list has a part for training and a part kept for the held-out questions.
"""

# ruff: noqa: SIM905 -- word lists read better as text

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Frames = tuple[list[str], list[str]]

# {p}: a noun phrase; {P}: the same with a capital letter
ASK: Frames = (
    [
        "What is {p}?",
        "What's {p}?",
        "Tell me {p}.",
        "Please tell me {p}.",
        "Give me {p}.",
        "Say {p}.",
        "Name {p}.",
        "{P}?",
        "{P}, please.",
        "{P}",
        "Do you know {p}?",
        "Can you tell me {p}?",
        "Could you tell me {p}?",
        "I need {p}.",
        "I forgot {p}.",
        "I would like to know {p}.",
        "Do you remember {p}?",
        "Can you give me {p}?",
        "Please say {p}.",
        "What would be {p}?",
        "{P} is what?",
        "{P} is?",
        "What was {p}?",
        "Can you say what {p} is?",
        "Do you know what {p} is?",
        "I wonder what {p} is.",
        "Any idea what {p} is?",
        "Tell me what {p} is.",
        "I am looking for {p}.",
        "I have to know {p}.",
        "My friend asks for {p}.",
        "Let me hear {p}.",
        "Write {p}.",
        "Write down {p}.",
        "Answer me: {p}?",
        "Do you have {p}?",
        "Would you tell me {p}?",
        "Which is {p}?",
        "Remind me: what is {p}?",
        "I ask you for {p}.",
        "Show me {p}.",
        "Please answer: what is {p}?",
        "Please name {p}.",
        "Please give me {p}.",
        "Can you name {p}?",
        "I want {p}.",
        "Could you say {p}?",
        "I can't remember {p}.",
        "You know {p}, right?",
        "What do you think is {p}?",
        "Look up {p}.",
        "Check {p}.",
        "Now I need {p}.",
        "What is {p} again?",
        "What's {p} again?",
        "I'm curious about {p}.",
        "Can I have {p}?",
        "Please remind me of {p}.",
        "What did you say is {p}?",
        "Could you remind me what {p} is?",
        "Tell us {p}.",
        "May I ask what {p} is?",
        "What exactly is {p}?",
        "{P}: what is it?",
        "How about {p}?",
        "And {p}?",
    ],
    [
        "I want to know {p}.",
        "Could you give me {p}?",
        "Please find {p}.",
        "I'd like to hear {p}.",
        "Do tell me {p}.",
        "Find {p} for me.",
        "I'd like to know {p}.",
        "Would you know {p}?",
        "Could you find {p}?",
    ],
)
# {d}: an order; {D}: the same with a capital letter
ORDER: Frames = (
    [
        "{D}.",
        "{D}",
        "Please {d}.",
        "Can you {d}?",
        "Could you {d}?",
        "I want you to {d}.",
        "Would you {d}?",
        "Now {d}.",
        "{D}, please.",
        "{D} for me.",
        "You should {d}.",
        "Will you {d}?",
        "I would like you to {d}.",
        "Are you able to {d}?",
        "Try to {d}.",
        "Can you please {d}?",
        "Let's see you {d}.",
        "It is time to {d}.",
        "Your task: {d}.",
        "Next, {d}.",
        "My wish: {d}.",
        "I ask you to {d}.",
        "Go and {d}.",
        "Could you please {d}?",
        "{D}!",
        "{D} now.",
        "Just {d}.",
        "I'd like you to {d}.",
        "Can you {d} for me?",
        "Go ahead and {d}.",
    ],
    [
        "I need you to {d}.",
        "You have to {d}.",
        "I must ask you to {d}.",
        "I want that you {d}.",
        "You are asked to {d}.",
    ],
)
# {s}: a statement; {S}: the same with a capital letter
TELL: Frames = (
    [
        "{S}.",
        "{S}.",
        "{S}!",
        "{S}",
        "Please remember that {s}.",
        "Remember that {s}.",
        "By the way, {s}.",
        "{S}. Please remember that.",
        "{S}. Remember that.",
        "{S}, please remember it.",
        "Remember: {s}.",
        "Just so you know, {s}.",
        "You should know that {s}.",
        "Please note that {s}.",
        "Note that {s}.",
        "Don't forget that {s}.",
        "I want you to remember that {s}.",
        "Note: {s}.",
        "Keep in mind that {s}.",
        "Hello! {S}.",
        "Hi, {s}.",
        "OK, {s}.",
        "Also, {s}.",
        "Let me tell you that {s}.",
        "{S}, by the way.",
        "So you know: {s}.",
        "{S}. Keep that in mind.",
        "Can you remember that {s}?",
        "I tell you that {s}.",
        "{S}. Don't forget it.",
        "{S}. Note that down.",
    ],
    [
        "For your information, {s}.",
        "Here is a fact about me: {s}.",
        "Something to keep: {s}.",
        "Listen, {s}.",
        "It is good to know that {s}.",
        "{S}. Make a note of it.",
        "You may need this later: {s}.",
    ],
)
PREFIX: Frames = (
    [
        "Quick question: ",
        "Can you help me? ",
        "I have a question. ",
        "Hello! ",
        "Hi, ",
        "Next question: ",
        "One more thing: ",
        "Good morning. ",
        "And ",
        "OK, ",
        "Do you know this? ",
        "Let me ask you something: ",
        "Well, ",
        "So, ",
        "Question: ",
        "Then ",
        "Good. ",
        "Right, ",
        "Very good! ",
        "Now, ",
    ],
    ["Here is my question: ", "Hey, ", "Thanks. ", "Nice. "],
)
SUFFIX = [
    " Please.",
    " Thank you.",
    " Thanks!",
    " I need to know.",
    " Answer briefly.",
    " Be quick.",
    " It is for my school.",
    " I forgot it.",
]
DROPPED = frozenset("what is the of a which tell me please does has name can you give do to".split())
ADDED = "now just again really exactly kindly maybe quickly perhaps actually simply".split()


def cap(text: str) -> str:
    """The text with a capital letter, unless it begins with a field."""
    return text[:1].upper() + text[1:]


ALL: list[Ways] = []


@dataclass(frozen=True, eq=False)
class Ways:
    """Every wording of one kind of message: own templates, and phrases, orders or statements to be framed.

    `around` says where a framed order stands when the message holds a text besides it: {f} is the framed order.
    """

    train: Sequence[str] = ()
    held: Sequence[str] = ()
    phrases: Sequence[str] = ()
    orders: Sequence[str] = ()
    statements: Sequence[str] = ()
    around: Sequence[str] = ("{f}",)

    def __post_init__(self) -> None:
        ALL.append(self)

    def _framed(self) -> list[tuple[str, Frames, Sequence[str]]]:
        kinds = (("p", ASK, self.phrases), ("d", ORDER, self.orders), ("s", TELL, self.statements))
        return [k for k in kinds if k[2]]

    def draw(self, rng: random.Random, test: bool) -> str:
        """A template from the wanted part."""
        own = self.held if test else self.train
        framed = self._framed()
        if own and (not framed or rng.random() >= 0.6):
            return rng.choice(own)
        letter, frames, options = rng.choice(framed)
        return _fill(rng.choice(frames[test]), letter, rng.choice(options), rng.choice(self.around))

    def templates(self, test: bool) -> Iterable[str]:
        """Everything that `draw` can give."""
        yield from self.held if test else self.train
        for letter, frames, options in self._framed():
            yield from (_fill(f, letter, o, a) for f in frames[test] for o in options for a in self.around)


def _fill(frame: str, letter: str, phrase: str, around: str) -> str:
    text = frame.replace(f"{{{letter.upper()}}}", cap(phrase)).replace(f"{{{letter}}}", phrase)
    return text if around == "{f}" else around.replace("{f}", text.rstrip(".?!"))


def dress(rng: random.Random, text: str, test: bool) -> str:
    """Varies a wording: openings, endings, lower case, a missing question mark, missing or added small words."""
    r = rng.random()
    if r < 0.2:
        prefix = rng.choice(PREFIX[test])
        text = prefix + (text if prefix[-2] in ".!?" else text[:1].lower() + text[1:])
    elif r < 0.3 and not test:
        text = text + rng.choice(SUFFIX)
    if rng.random() < 0.1:
        text = text.lower()
    if rng.random() < 0.1:
        text = text.rstrip("?.!")
    r = rng.random()
    if not test and r < 0.18:
        words = text.split(" ")
        if r < 0.1:
            words = [w for w in words if w.lower() not in DROPPED or rng.random() < 0.5] or words
        else:
            words.insert(rng.randint(0, len(words)), rng.choice(ADDED))
        text = " ".join(words)
    return text


# ---------------------------------------------------------------- what training can make
Words = tuple[str, ...]


def words_of(template: str) -> Words:
    """A template's words in lower case without punctuation; all fields look the same."""
    text = re.sub(r"\{\w+\}", "\0", template.lower())
    return tuple(re.findall(r"\0|[a-z0-9']+|[+*-]", text))


def _inside(short: Words, long: Words) -> bool:
    rest = iter(long)
    return all(w in rest for w in short)


class Trained:
    """Which templates `draw` and `dress` can make in training: letter case, punctuation and fields' names aside."""

    def __init__(self) -> None:
        self._by_core: dict[Words, set[Words]] = {}
        for ways in ALL:
            for template in ways.templates(False):
                words = words_of(template)
                self._by_core.setdefault(self._core(words), set()).add(words)
        self._openings = [v for p in PREFIX[0] for v in self._shortened(words_of(p)) if v]
        self._endings = [v for s in SUFFIX for v in self._shortened(words_of(s)) if v]

    @staticmethod
    def _core(words: Words) -> Words:
        return tuple(w for w in words if w not in DROPPED)

    @staticmethod
    def _shortened(words: Words) -> set[Words]:
        out: set[Words] = {()}
        for w in words:
            out = {(*v, w) for v in out} | (out if w in DROPPED else set())
        return out

    def source(self, template: str) -> str | None:
        """A training template that can become this one, by an opening, an ending, missing or added words; or None."""
        words = words_of(template)
        for plain in {words, *(words[:i] + words[i + 1 :] for i, w in enumerate(words) if w in ADDED)}:
            starts = {plain, *(plain[len(o) :] for o in self._openings if plain[: len(o)] == o)}
            for middle in starts | {s[: len(s) - len(e)] for s in starts for e in self._endings if s[-len(e) :] == e}:
                for found in self._by_core.get(self._core(middle), ()):
                    if _inside(middle, found):
                        return " ".join(found).replace("\0", "_")
        return None
