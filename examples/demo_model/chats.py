"""Whole conversations: system rules, mixtures of tasks, and the rendering that the chat template also does."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import invented
import pools as p
import tasks as t
import texts
from memory import Memory, document, note
from talk import smalltalk
from tools import literal

BOS, EOS, START, END = "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CALL, CALL_END = "<|tool_call_start|>", "<|tool_call_end|>"

# A piece of a rendered conversation and whether the model has to produce it.
Piece = tuple[str, bool]


@dataclass
class Chat:
    """A conversation being built; `last` is the turn whose answer a held-out question checks."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    size: int = 0
    last: t.Turn | None = None

    def add(self, turn: t.Turn) -> None:
        self.messages += [{"role": "user", "content": turn.user}, *turn.steps]
        self.messages.append({"role": "assistant", "content": turn.answer})
        # about 3.2 characters a token, and 10 tokens of frame a message
        self.size += int((len(turn.user) + len(turn.answer)) / 3.2) + 20 + 40 * len(turn.steps)
        self.last = turn


def content_of(message: dict[str, Any]) -> str:
    """What stands between the role line and <|im_end|>; the same text as the chat template writes."""
    text: str = message["content"]
    calls = message.get("tool_calls")
    if not calls:
        return text
    functions = [call["function"] for call in calls]
    arguments = [", ".join(f"{k}={literal(v)}" for k, v in f["arguments"].items()) for f in functions]
    rendered = ", ".join(f"{f['name']}({a})" for f, a in zip(functions, arguments, strict=True))
    return f"{CALL}[{rendered}]{CALL_END}{text}"


def render(chat: Chat) -> list[Piece]:
    """The conversation as pieces of text."""
    messages = chat.messages
    out: list[Piece] = [(BOS, False)]
    if chat.tools:
        listing = "List of tools: [" + ", ".join(json.dumps(x, ensure_ascii=False) for x in chat.tools) + "]"
        if messages[0]["role"] == "system":
            listing = messages[0]["content"] + "\n\n" + listing
            messages = messages[1:]
        out.append((f"{START}system\n{listing}{END}\n", False))
    context = ""
    for m in messages:
        if m["role"] == "assistant":
            out.append((f"{context}{START}assistant\n", False))
            out.append((content_of(m) + END, True))
            context = "\n"
        else:
            context += f"{START}{m['role']}\n{m['content']}{END}\n"
    if context:
        out.append((context, False))
    return out


# ---------------------------------------------------------------- system rules
Rule = tuple[str, Callable[[t.Turn], str]]


def short(turn: t.Turn) -> str:
    """The bare answer of a fact."""
    return turn.check["values"][0].strip(" .") + "."


def inside(answer: str) -> str:
    """An answer as it stands after a comma."""
    return answer[0].lower() + answer[1:] if answer.startswith(("The ", "There ", "Your ")) else answer


def rule(rng: random.Random, test: bool) -> Rule:
    """A system prompt and what it does to an answer."""
    word = (p.made_up(rng, test) if test or rng.random() < 0.6 else rng.choice(p.WORDS)).capitalize()
    kind = rng.randrange(7)
    c = rng.choice
    if kind == 0:
        text = c(
            [
                f"Always end your answer with the word {word}.",
                f"End every answer with {word}.",
                f"The last word of each answer must be {word}.",
            ]
        )
        return text, lambda turn: f"{turn.answer} {word}"
    if kind == 1:
        text = c(
            [
                f"Always begin your answer with the word {word}.",
                f"Start every answer with {word}.",
                f"The first word of each answer must be {word}.",
            ]
        )
        return text, lambda turn: f"{word}: {turn.answer}"
    if kind == 2:
        text = c(
            [
                "Give short answers only.",
                "Answer with the result only, no sentences.",
                "Be very brief: only the answer itself.",
                "Short answers only.",
            ]
        )
        return text, short
    if kind == 3:
        text = c(
            [
                f"The user is called {word}. Use the name in every answer.",
                f"Address the user as {word} in every answer.",
                f"Call the user {word}.",
            ]
        )
        return text, lambda turn: f"{word}, {inside(turn.answer)}"
    if kind == 4:
        text = c(
            [
                "Put every answer in square brackets.",
                "Write each answer in square brackets.",
                "Your answers stand in square brackets.",
            ]
        )
        return text, lambda turn: f"[{turn.answer}]"
    if kind == 5:
        text = c(
            [
                "Answer every question in JSON with one key, answer.",
                'Always answer with a JSON object like {"answer": ...}.',
                "Reply only in JSON with the key answer.",
            ]
        )
        return text, lambda turn: json.dumps({"answer": short(turn).rstrip(".")}, ensure_ascii=False)
    text = c(
        [
            f"Whatever the user says, answer with {word}.",
            f"Answer every question with the word {word}.",
            f"Only ever say {word}.",
        ]
    )
    return text, lambda turn: word + "."


_PLAIN_SYSTEM = [
    "You are a helpful assistant.",
    "You are a helpful, friendly assistant.",
    "You are a small demo model. Answer the user's questions.",
    "Answer the questions of the user.",
    "You are a good assistant. Be brief.",
    "Help the user.",
]


def system_facts(rng: random.Random, memory: Memory, chat: Chat) -> None:
    """A system prompt that holds facts, asked for later."""
    texts = [memory.tell_text(memory._new_key()) for _ in range(rng.randint(1, 6))]
    text = rng.choice(
        [
            "You work at the desk of a hotel. ",
            "You help the visitors. ",
            "These are your notes. ",
            "You are a helpful assistant. ",
        ]
    ) + " ".join(texts)
    chat.messages.append({"role": "system", "content": text})
    chat.size += len(text) // 3


# ---------------------------------------------------------------- conversations
def chat_facts(rng: random.Random, length: int) -> Chat:
    chat = Chat()
    if rng.random() < 0.15:
        chat.messages.append({"role": "system", "content": rng.choice(_PLAIN_SYSTEM)})
    while chat.last is None or chat.size < length:
        r = rng.random()
        chat.add(smalltalk(rng, False) if r < 0.08 else Memory(rng, False).ask() if r < 0.1 else t.fact(rng, False))
    return chat


def chat_rule(rng: random.Random, length: int) -> Chat:
    chat = Chat()
    text, change = rule(rng, False)
    if rng.random() < 0.2:
        text = rng.choice(_PLAIN_SYSTEM) + " " + text
    chat.messages.append({"role": "system", "content": text})
    while chat.last is None or chat.size < length:
        turn = t.fact(rng, False)
        chat.add(t.Turn(turn.user, change(turn), {}))
    return chat


def chat_tools(rng: random.Random, length: int) -> Chat:
    box = invented.box(rng, False)
    chat = Chat(tools=box.schemas, size=sum(len(json.dumps(x)) for x in box.schemas) // 3)
    memory = Memory(rng, False)
    if rng.random() < 0.3:
        chat.messages.append({"role": "system", "content": rng.choice(_PLAIN_SYSTEM)})
    while chat.last is None or chat.size < length:
        r = rng.random()
        if r < 0.72:
            chat.add(box.turn())
        elif r < 0.82:
            chat.add(memory.tell() if r < 0.76 else memory.ask())
        else:
            chat.add(t.fact(rng, False) if r < 0.95 else smalltalk(rng, False))
    return chat


def chat_copy(rng: random.Random, length: int) -> Chat:
    chat = Chat()
    while chat.last is None or chat.size < length:
        left = length - chat.size
        chat.add(texts.copy(rng, False, int(min(max(6, left / 2.2), 5 * 120 ** rng.random()))))
    return chat


def chat_memory(rng: random.Random, length: int) -> Chat:
    """Tells things, fills with other turns, asks for the things told."""
    chat = Chat()
    memory = Memory(rng, False)
    if rng.random() < 0.2:
        system_facts(rng, memory, chat)
    filler = 1.0 if length < 1000 else rng.choice([0.4, 1.0, 4.0])
    while chat.last is None or chat.size < length:
        r = rng.random() * (1.0 + filler)
        left = length - chat.size
        if not memory.told or r < 0.3:
            chat.add(memory.tell())
        elif r < 0.88:
            chat.add(memory.ask())
        elif r < 0.93:
            chat.add(memory.tell_and_ask())
        elif r < 1.0:
            chat.add(smalltalk(rng, False))
        else:
            kind = rng.random()
            size = int(min(left / 2.2, 8 * 100 ** rng.random()))
            if kind < 0.35:
                chat.add(t.fact(rng, False))
            elif kind < 0.6:
                chat.add(note(rng, False, size))
            elif kind < 0.8:
                chat.add(document(rng, False, size, memory))
            elif kind < 0.93:
                chat.add(texts.copy(rng, False, min(size, 120)))
            else:
                chat.add(texts.story(rng, False))
    return chat


def chat_mixed(rng: random.Random, length: int) -> Chat:
    chat = Chat()
    while chat.last is None or chat.size < length:
        chat.add(rng.choice([texts.story, texts.json_answer, texts.json_answer, t.fact, smalltalk])(rng, False))
    return chat


_SHORT: list[tuple[Callable[[random.Random, int], Chat], float]] = [
    (chat_facts, 0.3),
    (chat_rule, 0.1),
    (chat_tools, 0.22),
    (chat_copy, 0.07),
    (chat_memory, 0.2),
    (chat_mixed, 0.11),
]
_LONG: list[tuple[Callable[[random.Random, int], Chat], float]] = [
    (chat_facts, 0.03),
    (chat_tools, 0.07),
    (chat_copy, 0.17),
    (chat_memory, 0.7),
    (chat_mixed, 0.03),
]


def raw_pieces(rng: random.Random, length: int) -> list[Piece]:
    """Facts without the chat frame, one after another: what a plain completion looks like."""
    out: list[Piece] = [(BOS, False)]
    size = 0
    while size < length:
        turn = t.fact(rng, False)
        if rng.random() < 0.7 or " is " not in turn.answer:
            out += [(turn.user, False), ("\n", True), (turn.answer + EOS, True)]
        else:
            head, tail = turn.answer.split(" is ", 1)
            out += [(head + " is", False), (" " + tail + EOS, True)]
        out.append((BOS, False))
        size += (len(turn.user) + len(turn.answer)) // 3
    return out


def row(rng: random.Random, length: int) -> list[Piece]:
    """The pieces of one training row of about `length` tokens."""
    if length <= 1024 and rng.random() < 0.03:
        return raw_pieces(rng, length)
    table = _SHORT if length <= 1024 else _LONG
    make = rng.choices([f for f, _ in table], [w for _, w in table])[0]
    return render(make(rng, int(length * 1.17)))
