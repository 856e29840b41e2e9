"""Makes the held-out questions: wordings, names and numbers that the training chats never use.

python questions.py TOKENIZER.json OUT.jsonl      # makes the file
python questions.py --check FILE.jsonl            # proves that it is apart from the training chats
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import chats as c
import invented
import pools as p
import tasks as t
import texts
from memory import Memory, note
from talk import about_itself, smalltalk
from tokenizers import Tokenizer
from wording import ALL, PREFIX, Trained, words_of

Item = dict[str, Any]
COUNTS = {
    "facts": 120,
    "copy": 60,
    "recall": 80,
    "system": 40,
    "tools": 70,
    "json": 30,
    "story": 20,
    "invented": 40,
    "told": 30,
    "counting": 20,
    "talk": 20,
}


def _item(kind: str, chat: c.Chat) -> Item:
    """The last turn becomes the question; `answer` is the training-style reply, for the teacher-forced score."""
    assert chat.last is not None
    messages = chat.messages[: len(chat.messages) - 1 - len(chat.last.steps)]
    item: Item = {
        "kind": kind,
        "wording": chat.last.wording,
        "messages": messages,
        "check": chat.last.check,
        "answer": chat.last.answer,
    }
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
    chat.add(texts.copy(rng, True, int(8 * 30 ** rng.random()) if i % 6 else 400))
    return _item("copy", chat)


def recall(rng: random.Random, i: int) -> Item:
    """Something told early; every second item puts at least 2,000 tokens between telling and asking.

    Distance is the matter here, so things are told in plain words that training has too (`told` has others).
    """
    chat = c.Chat()
    memory = Memory(rng, True, plain=True)
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
            chat.add(smalltalk(rng, True))
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
        chat.add(t.Turn(turn.user, answer, {"type": "exact", "value": answer}, wording=turn.wording))
    return _item("system", chat)


def tools(rng: random.Random, _i: int) -> Item:
    box = invented.old_box(rng, True)
    chat = c.Chat(tools=box.schemas)
    for _ in range(rng.choice([0, 0, 1])):
        chat.add(box.turn())
    chat.add(box.turn())
    return _item("tools", chat)


def invented_(rng: random.Random, _i: int) -> Item:
    """Invented tools with one to three parameters, beside others that share words with them."""
    box = invented.new_box(rng, True)
    chat = c.Chat(tools=box.schemas)
    chat.add(box.turn())
    return _item("invented", chat)


def told(rng: random.Random, _i: int) -> Item:
    """Two things told in one sentence, one of them asked for."""
    chat = c.Chat()
    memory = Memory(rng, True)
    chat.add(memory.tell_two())
    for _ in range(rng.choice([0, 1, 2])):
        chat.add(t.fact(rng, True))
    chat.add(memory.ask(rng.choice(memory.told)))
    return _item("told", chat)


def counting(rng: random.Random, _i: int) -> Item:
    """Counting up from one or back to it, the number as a word or in digits."""
    chat = c.Chat()
    chat.add(t.counting_to(rng, True))
    return _item("counting", chat)


def talk(rng: random.Random, _i: int) -> Item:
    """Greetings, and the model about itself."""
    chat = c.Chat()
    chat.add(about_itself(rng, True))
    return _item("talk", chat)


def json_(rng: random.Random, _i: int) -> Item:
    chat = c.Chat()
    chat.add(texts.json_answer(rng, True))
    return _item("json", chat)


def story(rng: random.Random, _i: int) -> Item:
    chat = c.Chat()
    chat.add(texts.story(rng, True))
    return _item("story", chat)


MAKERS = {
    "facts": facts,
    "copy": copy,
    "recall": recall,
    "system": system,
    "tools": tools,
    "json": json_,
    "story": story,
    "invented": invented_,
    "told": told,
    "counting": counting,
    "talk": talk,
}


def make(seed: int = 2026) -> list[Item]:
    """All questions; those of one kind do not depend on the others."""
    out = []
    for kind, n in COUNTS.items():
        rng = random.Random(f"{seed}-{kind}")
        out += [{"id": f"{kind}-{i:03d}", **MAKERS[kind](rng, i)} for i in range(n)]
    return out


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


def shared_wordings() -> list[str]:
    """Held-out wordings that training can make too, letter case, punctuation and fields' names aside: must be none."""
    trained = Trained()
    out = []
    for ways in ALL:
        for wording in ways.templates(True):
            for opening in ("", *PREFIX[1]):
                source = trained.source(opening + wording)
                if source is not None:
                    out.append(f"{opening}{wording!r} can come from {source!r}")
    return sorted(set(out))


def taught_values(items: list[Item]) -> list[str]:
    """Names and numbers told in the held-out chats that training can draw too: must be none."""
    names = {*p.NAMES, *p.MORE_NAMES}
    out = [f"{name!r} is in both lists of names" for name in p.HELD_NAMES if name in names]
    for item in items:
        told = item["check"]["values"] if item["kind"] in ("recall", "told") else []
        if item["check"]["type"] == "calls":
            arguments = [v for call in item["check"]["calls"] for v in call["arguments"].values()]
            told = [str(round(10 * v) if isinstance(v, float) else v) for v in arguments]
        for value in told:
            # ages and numbers of people are below 100 and drawn from all
            if value in names or (value.isdigit() and int(value) > 99 and not p.held_out(f"n{value}")):
                out.append(f"{item['id']}: {value!r}")
    return out


def check(items: list[Item]) -> list[str]:
    """What is wrong with a file of held-out questions, a line each."""
    wrong = shared_wordings() + taught_values(items)
    held = {words_of(w) for ways in ALL for w in ways.templates(True)}
    for item in items:
        asked, wording = (re.sub(r"\b([Aa])n ", r"\1 ", x) for x in (item["messages"][-1]["content"], item["wording"]))
        parts = [re.escape(x) for x in re.split(r"\{\w+\}", wording.rstrip(".?!"))]
        if words_of(item["wording"]) not in held:
            wrong.append(f"{item['id']}: its wording is not a held-out one: {item['wording']!r}")
        if not re.search(".*?".join(parts), asked, re.S | re.I):
            wrong.append(f"{item['id']}: the question is not of its wording {item['wording']!r}")
    fresh = [{k: v for k, v in item.items() if k != "prompt_tokens"} for item in items]
    if fresh != make():
        wrong.append("the file is not the one that this generator makes")
    return wrong


def main() -> None:
    if sys.argv[1] == "--check":
        items = [json.loads(line) for line in Path(sys.argv[2]).read_text().splitlines()]
        wrong = check(items)
        print("\n".join(wrong) or f"{len(items)} questions, none of a wording, name or number of the training chats")
        raise SystemExit(bool(wrong))
    items = make()
    tokenizer = Tokenizer.from_file(sys.argv[1])
    for item in items:
        item["prompt_tokens"] = len(tokenizer.encode(prompt_text(item), add_special_tokens=False).ids)
    Path(sys.argv[2]).write_text("".join(json.dumps(x, ensure_ascii=False) + "\n" for x in items))
    print(len(items), "questions")


if __name__ == "__main__":
    main()
