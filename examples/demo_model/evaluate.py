"""Answers the held-out questions greedily with lfm2serve and scores the replies.

    python evaluate.py --save replies.json        # the packaged model
    python evaluate.py --check replies.json       # where torch and transformers are installed

--check runs transformers over each saved prompt and reply: it would have written the same reply if and only if every
token of it is transformers' most likely one. Where it is not, the lead of transformers' own choice is printed.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lfm2serve import LLM

HERE = Path(__file__).resolve().parent
ENDS = ("<|im_end|>", "<|endoftext|>")
REPLY = re.compile(r"<\|tool_call_start\|>(.*?)<\|tool_call_end\|>", re.S)
CONTEXT, MAX_TOKENS = 4096, 1000

Item = dict[str, Any]
Reply = dict[str, Any]  # {"text", "ids", "prompt_tokens"}
Answer = Callable[[list[Item]], list[Reply]]


def calls_of(text: str) -> list[dict[str, Any]] | None:
    """The calls of a reply, [{"name", "arguments"}], or None if they don't parse."""
    found = REPLY.search(text)
    if not found:
        return None
    try:
        tree = ast.parse(found[1].strip(), mode="eval").body
        assert isinstance(tree, ast.List)
        out = []
        for call in tree.elts:
            assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args
            out.append(
                {"name": call.func.id, "arguments": {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}}
            )
        return out
    except (SyntaxError, ValueError, AssertionError):
        return None


def holds(text: str, value: str) -> bool:
    """Whether the value stands in the text, not inside a longer word or number."""
    pattern = re.escape(value)
    if value[:1].isalnum():
        pattern = r"(?<!\w)" + pattern
    if value[-1:].isalnum():
        pattern += r"(?!\w)"
    return re.search(pattern, text) is not None


def body(text: str) -> str:
    for end in ENDS:
        text = text.removesuffix(end)
    return text


def right(check: dict[str, Any], reply: str) -> bool:
    """Whether one reply passes; a tool question's calls only (its second reply is checked by `used`)."""
    text = body(reply)
    ended = text != reply
    if check["type"] == "exact":
        return ended and text == check["value"]
    if check["type"] == "contains":
        return ended and all(holds(text, v) for v in check["values"])
    if check["type"] == "json":
        try:
            return ended and json.loads(text) == check["value"]
        except json.JSONDecodeError:
            return False
    if check["type"] == "story":
        sentences = re.split(r"(?<=[.!?]) ", text.replace("\n\n", " "))
        loops = any(sentences.count(s) > 4 for s in sentences)
        return ended and check["name"] in text and text.endswith("The end.") and not loops
    assert check["type"] == "calls"
    return ended and calls_of(text) == check["calls"]


def follow_up(item: Item, reply: Reply) -> Item | None:
    """The conversation of a tool question after its calls have been run, or None if they did not parse."""
    calls = calls_of(reply["text"])
    if calls is None:
        return None
    messages = [
        *item["messages"],
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": c} for c in calls]},
    ]
    messages += [{"role": "tool", "content": r} for r in item["check"]["results"]]
    check = {"type": "contains", "values": item["check"]["values"]}
    return {**item, "id": item["id"] + "-result", "messages": messages, "check": check}


def ours(llm: LLM) -> Answer:
    """Greedy replies of lfm2serve."""
    from lfm2serve import SamplingParams

    def params(item: Item) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=min(MAX_TOKENS, CONTEXT - item["prompt_tokens"]))

    def answer(items: list[Item]) -> list[Reply]:
        plain = [i for i in items if "tools" not in i]
        found = llm.chat([i["messages"] for i in plain], [params(i) for i in plain]) if plain else []
        outputs = dict(zip([i["id"] for i in plain], found, strict=True))
        for item in items:
            if "tools" in item:
                outputs[item["id"]] = llm.chat([item["messages"]], params(item), tools=item["tools"])[0]
        decode = llm.get_tokenizer().decode
        replies = []
        for output in (outputs[i["id"]] for i in items):
            ids = list(output.outputs[0].token_ids)
            text = decode(ids, skip_special_tokens=False)
            replies.append({"text": text, "ids": ids, "prompt_tokens": len(output.prompt_token_ids)})
        return replies

    return answer


def asked_and_used(items: list[Item], answer: Answer) -> dict[str, Reply]:
    """The replies by id; for calls also those to the tools' results, under the id with "-result"."""
    replies = {i["id"]: r for i, r in zip(items, answer(items), strict=True)}
    followed = [f for i in items if i["check"]["type"] == "calls" and (f := follow_up(i, replies[i["id"]]))]
    return replies | {f["id"]: r for f, r in zip(followed, answer(followed), strict=True)}


def passes(item: Item, replies: dict[str, Reply]) -> bool:
    """Whether an item's reply is right, and for calls also the use of their results."""
    if not right(item["check"], replies[item["id"]]["text"]):
        return False
    used = follow_up(item, replies[item["id"]]) if item["check"]["type"] == "calls" else None
    return used is None or right(used["check"], replies[used["id"]]["text"])


def check(model: Path, saved: dict[str, Reply], items: dict[str, Item]) -> None:
    """Prints how many saved replies are transformers' greedy replies too (bf16, one prompt at a time)."""
    import torch
    from transformers import AutoTokenizer, Lfm2MoeForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = Lfm2MoeForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    same = 0
    for key, reply in saved.items():
        item = (
            items[key]
            if key in items
            else follow_up(items[key.removesuffix("-result")], saved[key.removesuffix("-result")])
        )
        assert item is not None
        text = tokenizer.apply_chat_template(
            item["messages"], tools=item.get("tools"), add_generation_prompt=True, tokenize=False
        )
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            logits = (
                network(torch.tensor([prompt + reply["ids"]]), logits_to_keep=len(reply["ids"]) + 1)
                .logits[0, :-1]
                .float()
            )
        chosen = logits.argmax(-1).tolist()
        at = next((i for i, (x, y) in enumerate(zip(chosen, reply["ids"], strict=True)) if x != y), None)
        same += at is None
        if at is not None:
            lead = float(logits[at].max() - logits[at, reply["ids"][at]])
            top = float(logits[at].max())
            print(f"  {key}: token {at} of {len(chosen)} differs, leading by {lead:.3f} at {top:.1f}", flush=True)
    print(f"transformers' greedy reply is the same: {same}/{len(saved)} = {same / len(saved):.1%}")


def kind_of(item: Item) -> str:
    """The line of the score table an item counts in."""
    if item["kind"] != "recall":
        return str(item["kind"])
    return "recall, 2,000+ tokens" if item["prompt_tokens"] >= 2000 else "recall, shorter"


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="demo", help="demo (the packaged one) or a directory")
    ap.add_argument("--questions", type=Path, default=HERE.parents[1] / "tests" / "data" / "demo_questions.jsonl")
    ap.add_argument("--kinds", nargs="*", help="only these kinds")
    ap.add_argument("--save", type=Path)
    ap.add_argument("--check", type=Path)
    ap.add_argument("--show", type=int, default=10, help="how many wrong replies to print")
    args = ap.parse_args()

    items = [json.loads(line) for line in args.questions.read_text().splitlines()]
    items = [i for i in items if not args.kinds or i["kind"] in args.kinds]
    if args.check:
        model = HERE.parents[1] / "lfm2serve" / "demo" if args.model == "demo" else Path(args.model)
        return check(model, json.loads(args.check.read_text()), {i["id"]: i for i in items})
    from lfm2serve import LLM

    with LLM(args.model) as llm:
        replies = asked_and_used(items, ours(llm))
    score: dict[str, list[bool]] = {}
    shown = 0
    for item in items:
        good = passes(item, replies)
        score.setdefault(kind_of(item), []).append(good)
        if not good and shown < args.show:
            shown += 1
            got = [replies[k]["text"][:200] for k in (item["id"], item["id"] + "-result") if k in replies]
            print(f"wrong: {item['id']}\n  asked {item['messages'][-1]['content'][-150:]!r}")
            print(f"  got   {got}\n  want  {item['check'].get('calls', item['answer'][:200])!r}")
    for kind, results in score.items():
        print(f"{kind:24s} {sum(results):3d}/{len(results):3d} = {sum(results) / len(results):.1%}")
    if args.save:
        args.save.write_text(json.dumps(replies, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
