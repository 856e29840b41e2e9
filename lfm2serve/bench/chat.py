"""Chats with kept states and drafts on a real model: that these change no reply, and what they save."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lfm2serve.bench import kept
from lfm2serve.bench.throughput import Figure
from lfm2serve.devices import GIB
from lfm2serve.memory.prompt_cache import Mark
from lfm2serve.options import EngineOptions
from lfm2serve.outputs import RequestOutput
from lfm2serve.replies import Replies, Request
from lfm2serve.runtime import Runtime, load_runtime
from lfm2serve.sampling import SamplingParams

CHATS, TURNS = 8, 4
NAMES = ("Ada", "Ben", "Cora", "Dan", "Eva", "Finn", "Gina", "Hugo")
COUNTRIES = ("Japan", "Peru", "Kenya", "Italy", "Egypt", "Chile", "Nepal", "Spain")
SAID = (
    "My name is {name}. Please remember it.",
    "What is the capital of {country}?",
    "Type out this text once more:\n{text}",
    "What is my name?",
)
SYSTEM = "You are a helpful assistant."
SMALL_CACHE = 0.4  # of what the chats' states take


@dataclass(slots=True)
class ChatReport:
    """One run on one machine. failures: what should have been equal, resumed or accounted for and wasn't."""

    model: str
    device: str
    figures: list[Figure] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, measure: str, value: float, unit: str, beside: str = "") -> None:
        self.figures.append(Figure(measure, value, unit, beside))

    def expect(self, holds: bool, failure: str) -> None:
        if not holds:
            self.failures.append(failure)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply of a chat. digest: of its tokens and their log-probabilities. cached: tokens that didn't run again;
    least, most: what they have to lie between, from what ran in the turn before."""

    digest: str
    prompt: int
    cached: int
    least: int
    most: int


def measure(
    model: str,
    options: EngineOptions,
    *,
    dummy_weights: bool = False,
    length: int = 2048,
    tokens: int = 24,
    repeats: int = 5,
) -> ChatReport:
    """Equality first, then times. length: of the long prompts; tokens: of each reply in a chat; repeats: medians are
    taken of so many, of runs that alternate."""

    @contextmanager
    def loaded(**changes: Any) -> Iterator[Runtime]:
        runtime = load_runtime(model, replace(options, **changes), dummy_weights=dummy_weights)
        try:
            yield runtime
            runtime.engine.drain()
            clean = runtime.engine.census().clean and not runtime.engine.stats().counters.census_errors
            report.expect(clean, f"memory isn't accounted for after a drain: {runtime.engine.census()}")
        finally:
            runtime.close()

    report = ChatReport(model, "")
    with loaded() as runtime:
        report.device = runtime.backend.name
        expected = talk(runtime, tokens, prompt_cache=False, draft=False)
        for way, draft in (("kept states", False), ("kept states and drafts", True)):
            runtime.engine.clear_prompt_cache()
            _compare(report, way, runtime, expected, tokens, draft=draft)
        small = round(SMALL_CACHE * runtime.engine.stats().cache.held_bytes / GIB, 3)
        kept.figures(report, runtime, length, repeats)
    with loaded() as runtime:
        _compare(report, "the same after a restart", runtime, expected, tokens)
    longest = min(runtime.plan.context, 1024)
    with loaded(kv="fixed", context=longest, max_streams=CHATS, kv_pages=None) as runtime:
        _compare(report, "fixed pages", runtime, expected, tokens)
    with loaded(prompt_cache_gib=small) as runtime:
        _compare(report, f"a cache of {small} GiB", runtime, expected, tokens, small=True)
    kept.pressure(report, loaded, min(length, runtime.plan.context // 2))
    return report


def _compare(
    report: ChatReport,
    way: str,
    runtime: Runtime,
    expected: list[list[Turn]],
    tokens: int,
    *,
    draft: bool = True,
    small: bool = False,
) -> None:
    """The chats once more; small: states may have been evicted, else every later turn resumes."""
    before = runtime.engine.stats().cache.counters
    chats = talk(runtime, tokens, prompt_cache=True, draft=draft)
    after = runtime.engine.stats().cache.counters
    turns = [turn for chat in chats for turn in chat]
    pairs = list(zip(turns, [turn for chat in expected for turn in chat], strict=True))
    equal = sum(a.digest == b.digest for a, b in pairs)
    report.expect(equal == len(pairs), f"{way}: {len(pairs) - equal} of {len(pairs)} replies differ")
    later = [turn for chat in chats for turn in chat[1:]]
    hits = sum(turn.cached >= turn.least for turn in later)
    exact = sum(turn.least == turn.most == turn.cached for turn in later)
    evicted = (after.evictions - before.evictions).total()
    if small:
        report.expect(evicted > 0 and sum(turn.cached > 0 for turn in turns) > 0, f"{way}: no evictions or no hits")
    else:
        report.expect(hits == len(later), f"{way}: {len(later) - hits} later turns resumed too little")
    report.expect(all(turn.cached <= turn.most for turn in later), f"{way}: a turn resumed rows that can't be kept")
    beside = f"{hits} of {len(pairs)} resumed, {exact} exactly at the rows that ran; {evicted} evictions"
    report.add(f"replies equal: {way}", equal, f"of {len(pairs)}", beside)


# ---- chats ----


def talk(runtime: Runtime, tokens: int, *, prompt_cache: bool, draft: bool) -> list[list[Turn]]:
    """Eight chats of four turns, all chats at once; every other one is sampled."""
    chats = [_Chat(runtime, number) for number in range(CHATS)]
    for turn in range(TURNS):
        requests = [chat.ask(turn, tokens, prompt_cache=prompt_cache, draft=draft) for chat in chats]
        for chat, output in zip(chats, answers(runtime, requests), strict=True):
            chat.take(output)
        runtime.engine.drain()  # states that are prepared in the background count too
    return [chat.turns for chat in chats]


def answers(runtime: Runtime, requests: Sequence[Request]) -> list[RequestOutput]:
    """The replies to requests that are sent together."""
    replies = Replies(runtime, requests)
    replies.start()
    while not replies.ended:
        replies.next()
    return [request.output() for request in requests]


class _Chat:
    """One conversation, through the chat template or, where there is none, as a text that goes on."""

    def __init__(self, runtime: Runtime, number: int) -> None:
        self.turns: list[Turn] = []
        self._runtime = runtime
        self._number = number
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}] if number % 4 < 2 else []
        self._ids: list[int] = []
        self._settled = 0  # history end of the last request
        self._ran: list[int] = []  # tokens whose rows ran

    def ask(self, turn: int, tokens: int, *, prompt_cache: bool, draft: bool) -> Request:
        runtime, number = self._runtime, self._number
        said = SAID[turn].format(name=NAMES[number], country=COUNTRIES[number], text=kept.passage(number, 1))
        conversation, settled = None, 0
        if runtime.template is None:
            self._ids += runtime.encode_prompt(said, add_special_tokens=not self._ids)
            ids, settled = self._ids, len(self._ids) - 1
        else:
            self._messages.append({"role": "user", "content": said})
            conversation = runtime.conversation(self._messages, prompt_cache=prompt_cache)
            ids = conversation.token_ids
            settled = next((at for at, mark in conversation.marks if mark is Mark.HISTORY), 0)
        match = ids[: len(self._ran)] == self._ran
        self._bounds = (len(self._ran) if match else self._settled, len(self._ran) if match else len(ids) - 1)
        self._settled = settled
        params = SamplingParams(
            temperature=0.8 * (number % 2), max_tokens=tokens, logprobs=0, seed=1000 * turn + number
        )
        return Request(
            f"{number}.{turn}",
            None,
            list(ids),
            params,
            params.seed or 0,
            conversation,
            prompt_cache=prompt_cache,
            draft=draft,
        )

    def take(self, output: RequestOutput) -> None:
        reply, prompt = output.outputs[0], output.prompt_token_ids
        digest = hashlib.blake2b(digest_size=16)
        for token, entry in zip(reply.token_ids, reply.logprobs or [], strict=True):
            digest.update(f"{token} {entry[token].logprob.hex()} ".encode())
        self.turns.append(Turn(digest.hexdigest(), len(prompt), output.num_cached_tokens, *self._bounds))
        self._ran = [*prompt, *reply.token_ids[:-1]]  # the last token's row never runs
        self._ids = [*prompt, *reply.token_ids]
        self._messages.append({"role": "assistant", "content": reply.text})
