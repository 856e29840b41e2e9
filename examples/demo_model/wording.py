"""Ways to ask. A question is a noun phrase ("the capital of Peru") or an order ("count from 1 to 5") in a frame.

Frames are shared by all tasks, so that the model learns to read the phrase and not the frame. Each list has a part
for training and a part kept for the held-out questions.
"""

# ruff: noqa: SIM905 -- word lists read better as text

from __future__ import annotations

import random

Wordings = tuple[list[str], list[str]]

# {p}: a noun phrase; {P}: the same with a capital letter
ASK: Wordings = (
    ["What is {p}?", "What's {p}?", "Tell me {p}.", "Please tell me {p}.", "Give me {p}.", "Say {p}.", "Name {p}.",
     "{P}?", "{P}, please.", "{P}",
     "Do you know {p}?", "Can you tell me {p}?", "Could you tell me {p}?", "I need {p}.", "I forgot {p}.",
     "I would like to know {p}.",
     "Do you remember {p}?", "Can you give me {p}?", "Please say {p}.", "What would be {p}?", "{P} is what?",
     "{P} is?", "What was {p}?",
     "Can you say what {p} is?", "Do you know what {p} is?", "I wonder what {p} is.", "Any idea what {p} is?",
     "Tell me what {p} is.",
     "I am looking for {p}.", "I have to know {p}.", "My friend asks for {p}.", "Let me hear {p}.", "Write {p}.",
     "Write down {p}.", "Answer me: {p}?",
     "Do you have {p}?", "Would you tell me {p}?", "Which is {p}?", "Remind me: what is {p}?", "I ask you for {p}.",
     "Show me {p}.",
     "Please answer: what is {p}?", "Please name {p}.", "Please give me {p}.", "Can you name {p}?", "I want {p}.",
     "Could you say {p}?",
     "I can't remember {p}.", "You know {p}, right?", "What do you think is {p}?", "Look up {p}.", "Check {p}.",
     "Now I need {p}."],
    ["I want to know {p}.", "Could you give me {p}?", "Please find {p}.", "Say what {p} is.", "I'd like to hear {p}.",
     "Would you name {p}?",
     "Do tell me {p}.", "So what is {p}?", "Find {p} for me."],
)
# {d}: an order; {D}: the same with a capital letter
ORDER: Wordings = (
    ["{D}.", "{D}", "Please {d}.", "Can you {d}?", "Could you {d}?", "I want you to {d}.", "Would you {d}?",
     "Now {d}.", "{D}, please.", "{D} for me.",
     "You should {d}.", "Will you {d}?", "I would like you to {d}.", "Are you able to {d}?", "Try to {d}.",
     "Can you please {d}?", "Let's see you {d}.",
     "It is time to {d}.", "Your task: {d}.", "Next, {d}.", "My wish: {d}.", "I ask you to {d}.", "Go and {d}.",
     "Could you please {d}?"],
    ["I need you to {d}.", "Kindly {d}.", "Would you please {d}?", "Help me and {d}.", "Now please {d}."],
)
_PREFIX: Wordings = (
    ["Quick question: ", "Can you help me? ", "I have a question. ", "Hello! ", "Hi, ", "Next question: ",
     "One more thing: ", "Good morning. ", "And ",
     "OK, ", "Do you know this? ", "Let me ask you something: ", "Well, ", "So, ", "Question: ", "Then ", "Good. ",
     "Right, ", "Very good! ", "Now, "],
    ["Here is my question: ", "Hey, ", "Thanks. ", "Nice. "],
)
_SUFFIX = [" Please.", " Thank you.", " Thanks!", " I need to know.", " Answer briefly.", " Be quick.",
    " It is for my school.", " I forgot it."]
_DROPPED = {"what", "is", "the", "of", "a", "which", "tell", "me", "please", "does", "has", "name", "can", "you",
    "give", "do", "to"}
_ADDED = "now just again really exactly kindly maybe quickly perhaps actually simply".split()


def cap(text: str) -> str:
    return text[:1].upper() + text[1:]


def pick(rng: random.Random, wordings: Wordings, test: bool) -> str:
    return rng.choice(wordings[1] if test else wordings[0])


def ask(rng: random.Random, test: bool, phrases: list[str], special: Wordings) -> str:
    """A question template: a framed noun phrase, or one of the task's own wordings."""
    if phrases and rng.random() < 0.6:
        p = rng.choice(phrases)
        return pick(rng, ASK, test).replace("{P}", p if p.startswith("{") else cap(p)).replace("{p}", p)
    return pick(rng, special, test)


def order(rng: random.Random, test: bool, orders: list[str], special: Wordings) -> str:
    """An order template: a framed order, or one of the task's own wordings."""
    if orders and rng.random() < 0.6:
        d = rng.choice(orders)
        return pick(rng, ORDER, test).replace("{D}", cap(d)).replace("{d}", d)
    return pick(rng, special, test)


def dress(rng: random.Random, text: str, test: bool) -> str:
    """Varies a wording: openings, endings, lower case, a missing question mark, missing or added small words."""
    r = rng.random()
    if r < 0.2:
        prefix = pick(rng, _PREFIX, test)
        text = prefix + (text if prefix[-2] in ".!?" else text[:1].lower() + text[1:])
    elif r < 0.3 and not test:
        text = text + rng.choice(_SUFFIX)
    if rng.random() < 0.1:
        text = text.lower()
    if rng.random() < 0.1:
        text = text.rstrip("?.!")
    r = rng.random()
    if not test and r < 0.18:
        words = text.split(" ")
        if r < 0.1:
            words = [w for w in words if w.lower() not in _DROPPED or rng.random() < 0.5] or words
        else:
            words.insert(rng.randint(0, len(words)), rng.choice(_ADDED))
        text = " ".join(words)
    return text
