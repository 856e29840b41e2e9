"""Greetings, the model about itself, and what it does not know."""

from __future__ import annotations

import random

import pools as p
from tasks import Turn, contains
from wording import Ways, dress

SELF = "I am lfm2serve's demo model, a very small language model."
KNOWS = (
    "I know capitals, small sums, days, months, opposites and spelling. I can also remember what you tell me, "
    "copy texts, call tools and tell short stories."
)

_HELLO = Ways(
    [
        "Hello",
        "Hi",
        "Hello!",
        "Hi!",
        "Hi there!",
        "Good morning",
        "Good morning!",
        "Good evening!",
        "Hey",
        "Hey!",
        "Good day.",
        "Hello there",
        "Greetings!",
        "hi",
        "hello",
        "Good afternoon.",
    ],
    ["Hello, good to see you!", "Hey, good to see you.", "Hey there."],
)
_WHO = Ways(
    [
        "Who are you?",
        "What are you?",
        "What is your name?",
        "Are you a robot?",
        "Which model are you?",
        "Introduce yourself.",
        "What's your name?",
        "Are you a person?",
        "Are you ChatGPT?",
        "Are you human?",
        "What model is this?",
        "Who am I talking to?",
        "Tell me about yourself.",
        "Who made you?",
        "What kind of model are you?",
        "Do you have a name?",
        "What should I call you?",
        "Are you an AI?",
        "who r u",
        "Say who you are.",
        "Please introduce yourself.",
        "Are you a real person?",
        "Who is this?",
    ],
    ["Are you a model?", "Which kind of robot are you?", "Who are you, and who made you?"],
)
_CAN = Ways(
    [
        "What can you do?",
        "Help",
        "How can you help me?",
        "What do you know?",
        "What are you able to do?",
        "Can you help me?",
        "What can I ask you?",
        "What do you do?",
        "Help me.",
        "What are you good at?",
        "What can I do with you?",
        "What are your skills?",
        "How do you work?",
        "What is this?",
        "What topics do you know?",
        "Give me an overview of what you can do.",
    ],
    ["What things do you know?", "Which things can you do?", "What can I ask you about?"],
)
_THANKS = Ways(
    ["Thank you", "Thanks!", "Thank you very much.", "Great, thanks", "Thanks a lot!", "thanks"],
    ["Thanks, that was great.", "Thanks so much!"],
)
_BYE = Ways(
    ["Goodbye", "Bye!", "See you later.", "Good night", "bye", "Goodbye!", "See you!", "Bye bye."],
    ["Goodbye and thanks.", "Good night, see you."],
)
_HOW = Ways(
    [
        "How are you?",
        "How are you today?",
        "Are you well?",
        "How do you do?",
        "How is it going?",
        "How are you doing?",
        "What's up?",
    ],
    ["Are you doing well?", "How are things today?"],
)
_ANSWERS = [
    (_HELLO, f"Hello! {SELF} {KNOWS}", 3),
    (_WHO, f"{SELF} {KNOWS}", 4),
    (_CAN, f"{SELF} {KNOWS}", 3),
    (_THANKS, "You are welcome.", 1),
    (_BYE, "Goodbye!", 1),
    (_HOW, "I am well, thank you.", 1),
]

_ABOUT = """the weather tomorrow|quantum physics|the stock market|football results|this film|Shakespeare|
politics|the price of gold|cooking a turkey|programming in Rust|the meaning of life|black holes|the Roman Empire|
my taxes|the best phone|the news|chemistry|the history of music|jazz|medicine|the law|computers|
philosophy""".replace("\n", "").split("|")
_UNKNOWN = Ways(
    [
        "What do you think about {x}?",
        "Tell me about {x}.",
        "Explain {x}.",
        "Can you explain {x} to me?",
        "What is new about {x}?",
        "Write a poem about {x}.",
        "How does {x} work?",
        "Why is {x} important?",
        "Who invented {x}?",
    ],
    ["Which book about {x} is good?", "I have to write an essay about {x}."],
)


def about_itself(rng: random.Random, test: bool) -> Turn:
    """Greetings, thanks and questions about the model."""
    ways, answer, _ = rng.choices(_ANSWERS, [w for *_, w in _ANSWERS])[0]
    wording = ways.draw(rng, test)
    user = dress(rng, wording, test) if ways in (_WHO, _CAN) else wording
    return Turn(user, answer, contains(answer), wording=wording)


def smalltalk(rng: random.Random, test: bool) -> Turn:
    if rng.random() < 0.25:
        about = rng.choice(_ABOUT) if rng.random() < 0.5 else p.made_up(rng, test)
        wording = _UNKNOWN.draw(rng, test)
        return Turn(
            wording.format(x=about),
            "I do not know that. I am only a small demo model.",
            contains("do not know"),
            wording=wording,
        )
    return about_itself(rng, test)
