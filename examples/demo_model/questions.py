"""Makes the held-out questions: wordings, names and numbers that the training chats never use.

python questions.py TOKENIZER.json OUT.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import chats as c
import tasks as t
from memory import Memory, note
from tokenizers import Tokenizer
from tools import Toolbox

Item = dict[str, Any]
COUNTS = {"facts": 120, "copy": 60, "recall": 80, "system": 40, "tools": 50, "json": 30, "story": 20}


def _item(kind: str, chat: c.Chat, **extra: Any) -> Item:
    """The last turn becomes the question; `answer` is the training-style reply, for the teacher-forced score."""
    assert chat.last is not None
    messages = chat.messages[: len(chat.messages) - 1 - len(chat.last.steps)]
    item: Item = {"kind": kind, "messages": messages, "check": chat.last.check, "answer": chat.last.answer, **extra}
    if chat.tools:
        item["tools"] = chat.tools
    return item


def facts(rng: random.Random, i: int) -> Item:
    chat = c.Chat()
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        chat.add(t.fact(rng, True))
    chat.add(
        (t.capital, t.capital, t.capital, t.arithmetic, t.calendar, t.opposite, t.spelling, t.counting)[i % 8](
            rng, True
        )
    )
    return _item("facts", chat)


def copy(rng: random.Random, i: int) -> Item:
    chat = c.Chat()
    chat.add(t.copy(rng, True, int(8 * 30 ** rng.random()) if i % 6 else 400))
    return _item("copy", chat)


def recall(rng: random.Random, i: int) -> Item:
    """Something told early; every second item puts at least 2,000 tokens between telling and asking."""
    chat = c.Chat()
    memory = Memory(rng, True)
    for _ in range(rng.randint(1, 4)):
        chat.add(memory.tell())
    key = rng.choice(memory.told)
    distance = rng.randint(2150, 3000) if i % 2 else rng.randint(50, 1500)
    while chat.size < distance:
        r = rng.random()
        if r < 0.45:
            chat.add(t.fact(rng, True))
        elif r < 0.8:
            chat.add(note(rng, True, rng.randint(40, 500 if i % 2 else 150)))
        elif r < 0.9:
            chat.add(t.smalltalk(rng, True))
        else:
            others = [k for k in memory.told if k != key]
            chat.add(memory.ask(rng.choice(others)) if others else t.fact(rng, True))
    chat.add(memory.ask(key))
    return _item("recall", chat)


def system(rng: random.Random, _i: int) -> Item:
    chat = c.Chat()
    text, change = c.rule(rng, True)
    chat.messages.append({"role": "system", "content": text})
    for _ in range(rng.choice([1, 1, 2, 3])):
        turn = t.fact(rng, True)
        answer = change(turn)
        chat.add(t.Turn(turn.user, answer, {"type": "exact", "value": answer}))
    return _item("system", chat)


def tools(rng: random.Random, _i: int) -> Item:
    box = Toolbox(rng, True)
    chat = c.Chat(tools=box.schemas)
    for _ in range(rng.choice([0, 0, 1])):
        chat.add(box.turn())
    chat.add(box.turn())
    return _item("tools", chat)


def json_(rng: random.Random, _i: int) -> Item:
    chat = c.Chat()
    chat.add(t.json_answer(rng, True))
    return _item("json", chat)


def story(rng: random.Random, _i: int) -> Item:
    chat = c.Chat()
    chat.add(t.story(rng, True))
    return _item("story", chat)


def make(seed: int = 2026) -> list[Item]:
    rng = random.Random(seed)
    makers = {
        "facts": facts,
        "copy": copy,
        "recall": recall,
        "system": system,
        "tools": tools,
        "json": json_,
        "story": story,
    }
    return [{"id": f"{kind}-{i:03d}", **makers[kind](rng, i)} for kind, n in COUNTS.items() for i in range(n)]


def prompt_text(item: Item) -> str:
    """The rendered prompt, ready for the assistant's answer."""
    chat = c.Chat(item["messages"], item.get("tools", []))
    return "".join(text for text, _ in c.render(chat)) + f"{c.START}assistant\n"


def full_chat(item: Item) -> tuple[c.Chat, int]:
    """The item with its reference answer, and how many of the last assistant messages are the answer."""
    messages, check = list(item["messages"]), item["check"]
    if check["type"] != "calls":
        return c.Chat([*messages, {"role": "assistant", "content": item["answer"]}], item.get("tools", [])), 1
    calls = [{"type": "function", "function": call} for call in check["calls"]]
    messages.append({"role": "assistant", "content": "", "tool_calls": calls})
    messages += [{"role": "tool", "content": r} for r in check["results"]]
    return c.Chat([*messages, {"role": "assistant", "content": item["answer"]}], item.get("tools", [])), 2


if __name__ == "__main__":
    items = make()
    tokenizer = Tokenizer.from_file(sys.argv[1])
    for item in items:
        item["prompt_tokens"] = len(tokenizer.encode(prompt_text(item), add_special_tokens=False).ids)
    Path(sys.argv[2]).write_text("".join(json.dumps(x, ensure_ascii=False) + "\n" for x in items))
    print(len(items), "questions")
