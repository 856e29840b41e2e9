"""Tasks that tell the model something and ask for it later, and filler turns that put distance between the two."""

from __future__ import annotations

import random
from typing import Any

import pools as p
from tasks import Turn, contains
from wording import Wordings, ask, dress

# slot -> (wordings that tell it, wordings that ask for it, answer)
_SLOTS: dict[str, tuple[list[str], Wordings, str]] = {
    "name": (["My name is {v}.", "I am {v}.", "Hello, my name is {v}.", "Call me {v}.", "I'm called {v}.",
    "Hi! I am {v}, nice to meet you."],
             (["What is my name?", "What's my name?", "Do you remember my name?", "Who am I?", "Tell me my name.",
              "What am I called?", "Say my name."],
              ["Can you tell me my name?", "Which name did I give you?"]), "Your name is {v}."),
    "number": (["My lucky number is {v}.", "Remember my lucky number: {v}.", "{v} is my lucky number.",
    "The lucky number I chose is {v}."],
               (["What is my lucky number?", "What's my lucky number?", "Tell me my lucky number.",
                "Do you remember my lucky number?", "Which lucky number did I choose?"],
                ["Can you tell me my lucky number?", "Which number is my lucky number?"]), "Your lucky number is {v}."),
    "city": (["I live in {v}.", "My home is in {v}.", "I come from the town of {v}.", "My town is {v}."],
             (["Where do I live?", "In which town do I live?", "What is my town?", "Tell me where I live.",
              "Do you remember where I live?"],
              ["Can you tell me where I live?", "Which town do I live in?"]), "You live in {v}."),
    "colour": (["My favourite colour is {v}.", "I like {v} best of all colours.", "{v} is my favourite colour."],
               (["What is my favourite colour?", "Which colour do I like best?", "Tell me my favourite colour.",
                "What colour do I like?"],
                ["Do you know my favourite colour?", "Which is my favourite colour?"]),
                 "Your favourite colour is {v}."),
    "pet": (["My dog is called {v}.", "I have a dog named {v}.", "The name of my dog is {v}."],
            (["What is my dog called?", "What is the name of my dog?", "Tell me my dog's name.",
             "Do you remember my dog's name?", "What's my dog's name?"],
             ["How is my dog called?", "Which name does my dog have?"]), "Your dog is called {v}."),
    "word": (["The password is {v}.", "The secret word is {v}. Remember it.", "Please remember the secret word {v}.",
    "Our secret word is {v}."],
             (["What is the secret word?", "What's the password?", "Tell me the secret word.",
              "Which secret word did I tell you?", "Say the password."],
              ["Can you repeat the secret word?", "Do you still know the password?"]), "The secret word is {v}."),
    "age": (["I am {v} years old.", "My age is {v}.", "I turned {v} this year."],
            (["How old am I?", "What is my age?", "Tell me my age.", "Do you remember how old I am?"],
             ["Can you say how old I am?", "Which age did I tell you?"]),
            "You are {v} years old."),
    "job": (["I work as a {v}.", "My job is {v}.", "I am a {v} by trade."],
            (["What is my job?", "What do I work as?", "Tell me my job.", "What is my work?"],
             ["Do you remember my job?", "Which job do I have?"]),
            "You work as a {v}."),
    "friend": (["My best friend is {v}.", "{v} is my best friend.", "I have a best friend called {v}."],
               (["Who is my best friend?", "What is my best friend called?", "Tell me the name of my best friend."],
                ["What is the name of my best friend?", "Do you know who my best friend is?"]),
                 "Your best friend is {v}."),
    "list": (["My shopping list: {v}.", "I need to buy {v}.", "Remember my shopping list: {v}.",
    "On my shopping list are {v}."],
             (["What is on my shopping list?", "What do I need to buy?", "Tell me my shopping list.",
              "Repeat my shopping list.", "What's on my shopping list?"],
              ["Which things are on my shopping list?", "Read my shopping list to me."]), "Your shopping list: {v}."),
}
_UNTOLD = {
    "name": "your name", "number": "your lucky number", "city": "where you live", "colour": "your favourite colour",
    "pet": "your dog's name",
    "word": "the secret word", "age": "your age", "job": "your job", "friend": "your best friend's name",
    "list": "your shopping list",
}
_ACK = "Thank you, I will remember that."

_PHRASES = {
    "name": ["my name", "the name of me"], "number": ["my lucky number", "the lucky number I told you",
    "the number I call lucky"],
    "city": ["my town", "the town where I live", "my home town", "the place I live in"],
    "colour": ["my favourite colour", "the colour I like best", "the colour I love"],
    "pet": ["the name of my dog", "my dog's name", "the name I gave my dog"],
    "word": ["the secret word", "the password", "our secret word", "the word I told you"],
    "age": ["my age", "the age I told you"], "job": ["my job", "my work", "the job I have"],
    "friend": ["my best friend", "the name of my best friend", "my best friend's name"],
    "list": ["my shopping list", "the shopping list", "all on my shopping list", "the things I have to buy"],
}
_KEYED_PHRASES = [
    ["the code of the {k}", "the {k}'s code", "the code for the {k}"],
     ["the town of {K}", "the town where {K} lives", "the home of {K}"],
    ["the owner of the {k}", "the name of the owner of the {k}", "the person who owns the {k}"],
    ["the phone number of {K}", "{K}'s phone number", "the number of {K}"],
     ["the place of the {k}", "the place where the {k} is"],
]
_KEYED: list[tuple[list[str], Wordings, str]] = [
    (["The code of the {k} is {v}.", "Remember: the code of the {k} is {v}.", "Please note the code of the {k}: {v}."],
     (["What is the code of the {k}?", "What's the code of the {k}?", "Tell me the code of the {k}.",
      "Which code does the {k} have?", "Code of the {k}?"],
      ["Can you tell me the code of the {k}?", "Do you remember the code of the {k}?"]), "The code of the {k} is {v}."),
    (["{K} lives in {v}.", "Note that {K} lives in {v}.", "{K} has a house in {v}."],
     (["Where does {K} live?", "In which town does {K} live?", "Tell me where {K} lives."],
      ["Do you know where {K} lives?", "Which town does {K} live in?"]), "{K} lives in {v}."),
    (["The {k} belongs to {v}.", "Remember that the {k} belongs to {v}.", "{v} owns the {k}."],
     (["Who owns the {k}?", "To whom does the {k} belong?", "Whose is the {k}?", "Tell me who owns the {k}."],
      ["Do you know whose the {k} is?", "Who is the owner of the {k}?"]), "The {k} belongs to {v}."),
    (["The phone number of {K} is {v}.", "{K} has the phone number {v}.", "Write down the number of {K}: {v}."],
     (["What is the phone number of {K}?", "What is {K}'s phone number?", "Tell me the phone number of {K}.",
      "Which number does {K} have?"],
      ["Can you give me the phone number of {K}?", "How can I call {K}? I need the number."]),
       "The phone number of {K} is {v}."),
    (["The {k} is in the {v}.", "I put the {k} into the {v}.", "Remember that the {k} is in the {v}."],
     (["Where is the {k}?", "Where did I put the {k}?", "Tell me where the {k} is."],
      ["Do you know where the {k} is?", "In which place is the {k}?"]),
     "The {k} is in the {v}."),
]


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

    def __init__(self, rng: random.Random, test: bool) -> None:
        self.rng, self.test = rng, test
        self.slots: dict[str, str] = {}
        self.keyed: dict[tuple[int, str], str] = {}
        self.told: list[Any] = []

    def tell_text(self, key: Any = None) -> str:
        rng = self.rng
        if key is None:
            key = rng.choice(list(_SLOTS)) if rng.random() < 0.55 else self._new_key()
        if isinstance(key, str):
            value = value_for(rng, key, self.test)
            self.slots[key] = value
            text = rng.choice(_SLOTS[key][0]).format(v=value)
            text = text[0].upper() + text[1:]
        else:
            kind, k = key
            value = (str(p.number(rng, self.test, 100, 999999)) if kind in (0, 3)
                     else rng.choice(p.PLACES) if kind == 4 else p.name(rng, self.test))
            self.keyed[key] = value
            text = rng.choice(_KEYED[kind][0]).format(k=k, K=k, v=value)
        if key in self.told:
            self.told.remove(key)
        self.told.append(key)
        return text

    def _new_key(self) -> tuple[int, str]:
        kind = self.rng.randrange(len(_KEYED))
        if kind in (1, 3):
            return kind, p.name(self.rng, self.test)
        noun = self.rng.choice(p.NOUNS)
        return kind, f"{self.rng.choice(p.ADJECTIVES)} {noun}" if self.rng.random() < 0.6 else noun

    def tell(self, key: Any = None) -> Turn:
        """One turn telling one to three things, acknowledged."""
        texts = [self.tell_text(key)]
        while self.rng.random() < 0.3 and len(texts) < 3:
            texts.append(self.tell_text())
        return Turn(" ".join(texts), _ACK, {})

    def tell_and_ask(self) -> Turn:
        """Tells something and asks for something in the same message."""
        text = self.tell_text()
        turn = self.ask(self.rng.choice(self.told))
        return Turn(f"{text} {turn.user}", turn.answer, turn.check)

    def _question(self, phrases: list[str], special: Wordings, k: str = "") -> str:
        text = ask(self.rng, self.test, phrases, special).format(k=k, K=k)
        lowered = dress(self.rng, text, self.test)
        # a name must keep its capital letter: the answer does
        return lowered if not k or k in lowered else text

    def ask(self, key: Any = None) -> Turn:
        """A question about something told (any, by default), or sometimes about something never told."""
        rng = self.rng
        if key is None:
            missing = [s for s in _SLOTS if s not in self.slots]
            if not self.told or (missing and rng.random() < 0.06):
                slot = rng.choice(missing)
                return Turn(self._question(_PHRASES[slot], _SLOTS[slot][1]), f"You have not told me {_UNTOLD[slot]}.",
                    contains("have not told me"))
            key = rng.choice(self.told)
        if isinstance(key, str):
            value = self.slots[key]
            _, asks, answer = _SLOTS[key]
            return Turn(self._question(_PHRASES[key], asks), answer.format(v=value), contains(value))
        kind, k = key
        _, asks, answer = _KEYED[kind]
        value = self.keyed[key]
        return Turn(self._question(_KEYED_PHRASES[kind], asks, k), answer.format(k=k, K=k, v=value), contains(value))


_NOTE = ["Here is a text for you to read:\n{t}", "Please read this note:\n{t}", "A page from my book:\n{t}",
    "Some words about my day: {t}",
         "I wrote this today:\n{t}", "Read this, please. {t}"]


def note(rng: random.Random, test: bool, tokens: int) -> Turn:
    """A long text that needs no answer: distance for recall."""
    return Turn(rng.choice(_NOTE).format(t=p.passage(rng, test, tokens)), "Thank you, I have read it.", {})


def document(rng: random.Random, test: bool, tokens: int, memory: Memory) -> Turn:
    """A long text with facts hidden in it; they are asked for later through `memory`."""
    parts = [p.sentence(rng) for _ in range(max(2, tokens // 14))]
    for _ in range(rng.randint(1, 4)):
        parts.insert(rng.randint(0, len(parts)), memory.tell_text(memory._new_key()))
    return Turn(rng.choice(_NOTE).format(t=" ".join(parts)), "Thank you, I have read it.", {})
