"""Tasks that tell the model something and ask for it later, and filler turns that put distance between the two."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pools as p
from tasks import Turn, contains
from wording import TELL, Ways, cap, dress


@dataclass(frozen=True)
class Slot:
    """One kind of thing to remember: how it is told, how it is asked for, the answer, and what is missing untold."""

    tell: Ways
    ask: Ways
    answer: str
    untold: str = ""


def _slot(
    answer: str,
    untold: str,
    told: list[str],
    statements: list[str],
    asks: list[str],
    held: list[str],
    phrases: list[str],
) -> Slot:
    return Slot(Ways(told, statements=statements), Ways(asks, held, phrases=phrases), answer, untold)


_SLOTS: dict[str, Slot] = {
    "name": _slot(
        "Your name is {v}.",
        "your name",
        [
            "My name is {v}.",
            "I am {v}.",
            "Hello, my name is {v}.",
            "Call me {v}.",
            "I'm called {v}.",
            "Hi! I am {v}, nice to meet you.",
            "I'm {v}.",
            "Hi, I'm {v}.",
            "Hello! My name is {v}. Nice to meet you.",
            "You can call me {v}.",
            "People call me {v}.",
            "This is {v} speaking.",
            "{v} is my name.",
        ],
        ["my name is {v}", "I am called {v}", "my name is {v}", "I'm {v}", "my first name is {v}"],
        [
            "What is my name?",
            "What's my name?",
            "Do you remember my name?",
            "Who am I?",
            "Tell me my name.",
            "What am I called?",
            "Say my name.",
            "What did I say my name was?",
            "Do you know my name?",
            "Do you know who I am?",
            "How am I called?",
            "What name did I tell you?",
            "Do you still know my name?",
            "And what is my name?",
            "Can you remember my name?",
        ],
        ["Which name did I give you?", "Could you say my name to me?"],
        ["my name", "the name of me", "my first name"],
    ),
    "number": _slot(
        "Your lucky number is {v}.",
        "your lucky number",
        [
            "My lucky number is {v}.",
            "Remember my lucky number: {v}.",
            "{v} is my lucky number.",
            "The lucky number I chose is {v}.",
            "Please remember my lucky number: {v}.",
            "Lucky number: {v}.",
            "My lucky number? It is {v}.",
            "I chose {v} as my lucky number.",
            "Please remember the number {v}.",
        ],
        [
            "my lucky number is {v}",
            "{v} is my lucky number",
            "my lucky number is {v}",
            "I have the lucky number {v}",
            "the number {v} brings me luck",
            "my favourite number is {v}",
        ],
        [
            "What is my lucky number?",
            "What's my lucky number?",
            "Tell me my lucky number.",
            "Do you remember my lucky number?",
            "Which lucky number did I choose?",
            "Which number is it?",
            "What number did I tell you?",
            "Which number brings me luck?",
            "What was the number?",
            "Do you still know my lucky number?",
            "Which number did I ask you to remember?",
        ],
        ["Which number is my lucky number?", "Could you find my lucky number?"],
        ["my lucky number", "the lucky number I told you", "the number I call lucky", "my favourite number"],
    ),
    "city": _slot(
        "You live in {v}.",
        "where you live",
        ["I live in {v}.", "My home is in {v}.", "I come from the town of {v}.", "My town is {v}.", "I'm from {v}."],
        [
            "I live in {v}",
            "my home is in {v}",
            "I have a house in {v}",
            "my town is {v}",
            "I come from {v}",
            "my city is {v}",
            "I moved to {v}",
        ],
        [
            "Where do I live?",
            "In which town do I live?",
            "What is my town?",
            "Tell me where I live.",
            "Do you remember where I live?",
            "Where am I from?",
            "Which city do I live in?",
            "Where is my home?",
            "What city am I from?",
            "Do you know where I live?",
            "Where did I say I live?",
            "Where do I come from?",
        ],
        ["Can you tell me where I live?", "Which town do I live in?"],
        ["my town", "the town where I live", "my home town", "the place I live in", "my city"],
    ),
    "colour": _slot(
        "Your favourite colour is {v}.",
        "your favourite colour",
        [
            "My favourite colour is {v}.",
            "I like {v} best of all colours.",
            "{v} is my favourite colour.",
            "My favorite color is {v}.",
        ],
        [
            "my favourite colour is {v}",
            "I love the colour {v}",
            "{v} is my favourite colour",
            "I like {v} best",
            "my favorite color is {v}",
        ],
        [
            "What is my favourite colour?",
            "Which colour do I like best?",
            "Tell me my favourite colour.",
            "What colour do I like?",
            "What is my favorite color?",
            "Do you remember my favourite colour?",
            "Which colour did I say I like?",
            "Which colour do I love?",
        ],
        ["Which colour is my favourite colour?", "Which colour is it that I like best?"],
        ["my favourite colour", "the colour I like best", "the colour I love", "my favorite color"],
    ),
    "pet": _slot(
        "Your dog is called {v}.",
        "your dog's name",
        [
            "My dog is called {v}.",
            "I have a dog named {v}.",
            "The name of my dog is {v}.",
            "My dog's name is {v}.",
            "I have a dog. Its name is {v}.",
            "I have a dog called {v}.",
        ],
        [
            "my dog is called {v}",
            "my dog's name is {v}",
            "I have a dog named {v}",
            "the name of my dog is {v}",
            "I own a dog called {v}",
        ],
        [
            "What is my dog called?",
            "What is the name of my dog?",
            "Tell me my dog's name.",
            "Do you remember my dog's name?",
            "What's my dog's name?",
            "Do you know my dog's name?",
            "What did I call my dog?",
            "How do I call my dog?",
            "Who is my dog?",
            "What was my dog's name?",
        ],
        ["How is my dog called?", "Which name does my dog have?"],
        ["the name of my dog", "my dog's name", "the name I gave my dog"],
    ),
    "word": _slot(
        "The secret word is {v}.",
        "the secret word",
        [
            "The password is {v}.",
            "The secret word is {v}. Remember it.",
            "Please remember the secret word {v}.",
            "Our secret word is {v}.",
            "Remember the word {v}.",
            "Please remember the word {v}.",
            "Remember this: {v}.",
            "Secret word: {v}.",
        ],
        ["the password is {v}", "the secret word is {v}", "our secret word is {v}", "our password is {v}"],
        [
            "What is the secret word?",
            "What's the password?",
            "Tell me the secret word.",
            "Which secret word did I tell you?",
            "Say the password.",
            "What word did I tell you?",
            "Which word did I ask you to remember?",
            "What was the secret word?",
            "Do you remember the password?",
        ],
        ["Can you repeat the secret word?", "Do you still know the password?"],
        ["the secret word", "the password", "our secret word", "the word I told you"],
    ),
    "age": _slot(
        "You are {v} years old.",
        "your age",
        ["I am {v} years old.", "My age is {v}.", "I turned {v} this year.", "I'm {v} years old.", "Age: {v}."],
        ["I am {v} years old", "my age is {v}", "I'm {v}", "I am {v} years of age", "I have just turned {v}"],
        [
            "How old am I?",
            "What is my age?",
            "Tell me my age.",
            "Do you remember how old I am?",
            "What's my age?",
            "How many years old am I?",
            "Do you know how old I am?",
            "What age am I?",
            "How old did I say I am?",
        ],
        ["Can you say how old I am?", "Which age did I tell you?"],
        ["my age", "the age I told you"],
    ),
    "job": _slot(
        "You work as a {v}.",
        "your job",
        ["I work as a {v}.", "My job is {v}.", "I am a {v} by trade.", "I'm a {v}."],
        ["I work as a {v}", "my job is {v}", "I am a {v}", "I earn my money as a {v}", "I'm a {v}"],
        [
            "What is my job?",
            "What do I work as?",
            "Tell me my job.",
            "What is my work?",
            "What do I do for a living?",
            "What's my job?",
            "Do you know my job?",
            "What did I say my job is?",
            "What is my profession?",
        ],
        ["Which job do I have?", "Which job is my job?"],
        ["my job", "my work", "the job I have", "my profession"],
    ),
    "friend": _slot(
        "Your best friend is {v}.",
        "your best friend's name",
        ["My best friend is {v}.", "{v} is my best friend.", "I have a best friend called {v}."],
        [
            "my best friend is {v}",
            "{v} is my best friend",
            "my best friend is called {v}",
            "the name of my best friend is {v}",
        ],
        [
            "Who is my best friend?",
            "What is my best friend called?",
            "Tell me the name of my best friend.",
            "What's my best friend's name?",
            "Do you know my best friend?",
            "Do you remember my best friend's name?",
            "Who did I say is my best friend?",
        ],
        ["Which name does my best friend have?", "Do you know who my best friend is?"],
        ["my best friend", "the name of my best friend", "my best friend's name"],
    ),
    "list": _slot(
        "Your shopping list: {v}.",
        "your shopping list",
        [
            "My shopping list: {v}.",
            "I need to buy {v}.",
            "Remember my shopping list: {v}.",
            "On my shopping list are {v}.",
            "Shopping list: {v}.",
            "Please remember my shopping list: {v}.",
        ],
        [
            "my shopping list is {v}",
            "I have to buy {v}",
            "I need to buy {v}",
            "on my shopping list are {v}",
            "I want to buy {v}",
        ],
        [
            "What is on my shopping list?",
            "What do I need to buy?",
            "Tell me my shopping list.",
            "Repeat my shopping list.",
            "What's on my shopping list?",
            "What do I have to buy?",
            "What must I buy?",
            "What was on my shopping list?",
            "What did I want to buy?",
            "Show me my shopping list.",
        ],
        ["Which things are on my shopping list?", "Read my shopping list to me."],
        ["my shopping list", "the shopping list", "all on my shopping list", "the things I have to buy"],
    ),
}
_ACK = "Thank you, I will remember that."

_KEYED = [
    _slot(
        "The code of the {k} is {v}.",
        "",
        [
            "The code of the {k} is {v}.",
            "Remember: the code of the {k} is {v}.",
            "Please note the code of the {k}: {v}.",
        ],
        ["the code of the {k} is {v}", "the {k} has the code {v}", "{v} is the code of the {k}"],
        [
            "What is the code of the {k}?",
            "What's the code of the {k}?",
            "Tell me the code of the {k}.",
            "Which code does the {k} have?",
            "Code of the {k}?",
        ],
        ["Which code is the code of the {k}?", "Could you find the code of the {k}?"],
        ["the code of the {k}", "the {k}'s code", "the code for the {k}"],
    ),
    _slot(
        "{k} lives in {v}.",
        "",
        ["{k} lives in {v}.", "Note that {k} lives in {v}.", "{k} has a house in {v}."],
        ["{k} lives in {v}", "the home of {k} is in {v}", "{k} has moved to {v}"],
        ["Where does {k} live?", "In which town does {k} live?", "Tell me where {k} lives."],
        ["Do you know where {k} lives?", "Which town does {k} live in?"],
        ["the town of {k}", "the town where {k} lives", "the home of {k}"],
    ),
    _slot(
        "The {k} belongs to {v}.",
        "",
        ["The {k} belongs to {v}.", "Remember that the {k} belongs to {v}.", "{v} owns the {k}."],
        ["the {k} belongs to {v}", "{v} owns the {k}", "the owner of the {k} is {v}"],
        ["Who owns the {k}?", "To whom does the {k} belong?", "Whose is the {k}?", "Tell me who owns the {k}."],
        ["Do you know whose the {k} is?", "Who is the owner of the {k}?"],
        ["the owner of the {k}", "the name of the owner of the {k}", "the person who owns the {k}"],
    ),
    _slot(
        "The phone number of {k} is {v}.",
        "",
        ["The phone number of {k} is {v}.", "{k} has the phone number {v}.", "Write down the number of {k}: {v}."],
        ["the phone number of {k} is {v}", "{k} has the phone number {v}", "{k}'s phone number is {v}"],
        [
            "What is the phone number of {k}?",
            "What is {k}'s phone number?",
            "Tell me the phone number of {k}.",
            "Which number does {k} have?",
        ],
        ["Which phone number does {k} have?", "How can I call {k}? I need the number."],
        ["the phone number of {k}", "{k}'s phone number", "the number of {k}"],
    ),
    _slot(
        "The {k} is in the {v}.",
        "",
        ["The {k} is in the {v}.", "I put the {k} into the {v}.", "Remember that the {k} is in the {v}."],
        ["the {k} is in the {v}", "I left the {k} in the {v}", "I put the {k} into the {v}"],
        ["Where is the {k}?", "Where did I put the {k}?", "Tell me where the {k} is.", "Where did I leave the {k}?"],
        ["Do you know where the {k} is?", "In which place is the {k}?"],
        ["the place of the {k}", "the place where the {k} is"],
    ),
]
# two things in one sentence
_BOTH = Ways(statements=["{s1} and {s2}", "{s1}, and {s2}", "{s1}; {s2}"])


def value_for(rng: random.Random, slot: str, test: bool) -> str:
    if slot in ("name", "city", "friend", "pet"):
        return p.name(rng, test)
    if slot == "word":
        return p.made_up(rng, test) if test or rng.random() < 0.6 else rng.choice(p.NOUNS)
    if slot == "number":
        return str(p.number(rng, test, 2, 99999))
    if slot == "age":
        return str(rng.randint(5, 95))
    if slot == "list":
        return ", ".join(rng.sample(p.ITEMS, rng.randint(2, 6)))
    return rng.choice({"colour": p.COLOURS, "job": p.JOBS}[slot])


class Memory:
    """What has been told in one conversation. `tell` and `ask` give turns; a later telling replaces an earlier one."""

    def __init__(self, rng: random.Random, test: bool, plain: bool = False) -> None:
        """plain: things are told in the first three of each list of wordings, which every stage of training has."""
        self.rng, self.test, self.plain = rng, test, plain
        self.slots: dict[str, str] = {}
        self.keyed: dict[tuple[int, str], str] = {}
        self.told: list[Any] = []

    def _learn(self, key: Any = None) -> tuple[Ways, dict[str, str]]:
        """Draws a thing and its value; gives the ways to tell it."""
        rng = self.rng
        if key is None:
            key = rng.choice(list(_SLOTS)) if rng.random() < 0.6 else self._new_key()
        if key in self.told:
            self.told.remove(key)
        self.told.append(key)
        if isinstance(key, str):
            self.slots[key] = value = value_for(rng, key, self.test)
            return _SLOTS[key].tell, {"v": value}
        kind, k = key
        self.keyed[key] = value = (
            str(p.number(rng, self.test, 100, 999999))
            if kind in (0, 3)
            else rng.choice(p.PLACES)
            if kind == 4
            else p.name(rng, self.test)
        )
        return _KEYED[kind].tell, {"k": k, "v": value}

    def tell_text(self, key: Any = None) -> str:
        ways, fields = self._learn(key)
        wording = self.rng.choice(ways.train[:3]) if self.plain else ways.draw(self.rng, self.test)
        return cap(wording.format(**fields))

    def tell_two(self) -> Turn:
        """Two different things about the user in one sentence."""
        parts = []
        for key in self.rng.sample(list(_SLOTS), 2):
            ways, fields = self._learn(key)
            parts.append(self.rng.choice(ways.statements).format(**fields))
        both = self.rng.choice(_BOTH.statements).format(s1=parts[0], s2=parts[1])
        text = self.rng.choice(TELL[self.test]).replace("{S}", cap(both)).replace("{s}", both)
        return Turn(text, _ACK, {})

    def _new_key(self) -> tuple[int, str]:
        kind = self.rng.randrange(len(_KEYED))
        if kind in (1, 3):
            return kind, p.name(self.rng, self.test)
        noun = self.rng.choice(p.NOUNS)
        return kind, f"{self.rng.choice(p.ADJECTIVES)} {noun}" if self.rng.random() < 0.6 else noun

    def tell(self, key: Any = None) -> Turn:
        """One turn telling one to three things, acknowledged."""
        if key is None and not self.plain and self.rng.random() < 0.25:
            return self.tell_two()
        texts = [self.tell_text(key)]
        while self.rng.random() < 0.3 and len(texts) < 3:
            texts.append(self.tell_text())
        return Turn(" ".join(texts), _ACK, {})

    def tell_and_ask(self) -> Turn:
        """Tells something and asks for something in the same message."""
        text = self.tell_text()
        turn = self.ask(self.rng.choice(self.told))
        return Turn(f"{text} {turn.user}", turn.answer, turn.check)

    def _question(self, ways: Ways, k: str = "") -> tuple[str, str]:
        wording = ways.draw(self.rng, self.test)
        text = cap(wording.format(k=k))
        lowered = dress(self.rng, text, self.test)
        # a name must keep its capital letter: the answer does
        return (lowered if not k or k in lowered else text), wording

    def ask(self, key: Any = None) -> Turn:
        """A question about something told (any, by default), or sometimes about something never told."""
        rng = self.rng
        if key is None:
            missing = [s for s in _SLOTS if s not in self.slots]
            if not self.told or (missing and rng.random() < 0.06):
                slot = _SLOTS[rng.choice(missing)]
                text, wording = self._question(slot.ask)
                return Turn(text, f"You have not told me {slot.untold}.", contains("have not told me"), wording=wording)
            key = rng.choice(self.told)
        if isinstance(key, str):
            slot, k, value = _SLOTS[key], "", self.slots[key]
        else:
            slot, k, value = _KEYED[key[0]], key[1], self.keyed[key]
        text, wording = self._question(slot.ask, k)
        return Turn(text, slot.answer.format(k=k, v=value), contains(value), wording=wording)


_NOTE = Ways(
    [
        "Here is a text for you to read:\n{t}",
        "Please read this note:\n{t}",
        "A page from my book:\n{t}",
        "Some words about my day: {t}",
        "I wrote this today:\n{t}",
        "Read this, please. {t}",
    ],
    ["This is from my diary:\n{t}", "Look what I found in the newspaper: {t}"],
)


def note(rng: random.Random, test: bool, tokens: int) -> Turn:
    """A long text that needs no answer: distance for recall."""
    wording = _NOTE.draw(rng, test)
    return Turn(wording.format(t=p.passage(rng, test, tokens)), "Thank you, I have read it.", {}, wording=wording)


def document(rng: random.Random, test: bool, tokens: int, memory: Memory) -> Turn:
    """A long text with facts hidden in it; they are asked for later through `memory`."""
    parts = [p.sentence(rng) for _ in range(max(2, tokens // 14))]
    for _ in range(rng.randint(1, 4)):
        parts.insert(rng.randint(0, len(parts)), memory.tell_text(memory._new_key()))
    wording = _NOTE.draw(rng, test)
    return Turn(wording.format(t=" ".join(parts)), "Thank you, I have read it.", {}, wording=wording)
