"""The law at full size: the same requests in many ways, compared token by token and bit by bit."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kernels_numba.batch import PAGE_ROWS
from lfm2serve.bench.dummy import Dummy, Reply, ask, dummy, prompt
from lfm2serve.options import EngineOptions
from lfm2serve.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute the replies. together: how many run at once; graphs: whether decode rounds are CUDA graphs."""

    together: int = 1
    prompt_chunk: int | None = None
    kv: str = "paged"
    shuffle: int | None = None
    drafts: bool = False
    keeps: bool = False
    graphs: bool = True

    def __str__(self) -> str:
        pages = f"{self.kv}{'' if self.shuffle is None else ', shuffled'}"
        extras = "".join(f", {name}" for name in ("drafts", "keeps") if getattr(self, name))
        extras += "" if self.graphs else ", no graphs"
        return f"{self.together} at once, chunks of {self.prompt_chunk or 'the largest size'}, {pages}{extras}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many replies of one way equal the reference."""

    way: str
    equal: int
    replies: int
    seconds: float

    @property
    def ok(self) -> bool:
        return self.equal == self.replies


def reply_hash(reply: Reply) -> str:
    """Token ids and the bits of the log-probabilities (chosen and most likely tokens) of a reply."""
    digest = hashlib.blake2b(digest_size=16)
    for token, scores in zip(reply.tokens, reply.logprobs, strict=True):
        digest.update(f"{token} {scores.logprob.hex()} {scores.rank}".encode())
        digest.update("".join(f" {t} {value.hex()}" for t, value in scores.top).encode())
    return digest.hexdigest()


def ways(chunks: list[int], together: list[int], randoms: int, graphs: bool, seed: int = 0) -> Iterator[Way]:
    """One factor at a time, then random combinations. graphs: the device has them."""
    yield from (Way(prompt_chunk=chunk) for chunk in chunks)
    yield from (Way(together=count) for count in together)
    yield Way(kv="fixed")
    yield Way(shuffle=1)
    yield Way(drafts=True)
    yield Way(keeps=True)
    if graphs:
        yield Way(graphs=False)
    rng = random.Random(seed)
    for number in range(randoms):
        yield Way(
            together=rng.choice(together),
            prompt_chunk=rng.choice([None, *chunks]),
            kv=rng.choice(["paged", "fixed"]),
            shuffle=rng.choice([None, number + 2]),
            drafts=rng.random() < 0.5,
            keeps=rng.random() < 0.5,
            graphs=rng.random() < 0.7 or not graphs,
        )


def compare(
    model: str, options: EngineOptions, *, lengths: list[int], tokens: int, chunks: list[int], together: list[int],
    randoms: int, limit_s: float,
) -> Iterator[Outcome]:  # fmt: skip
    """Decoded rows against prompt rows, then every way, first the reference itself again. After limit_s seconds no
    further way starts."""
    started = time.perf_counter()
    with dummy(model, options) as made:
        sampled, greedy = (SamplingParams(temperature=t, top_p=0.95, max_tokens=tokens, logprobs=5) for t in (0.8, 0.0))
        requests = [(prompt(length, n), greedy if n % 2 else sampled) for n, length in enumerate(lengths)]
        expected, _ = _run(made, Way(), requests)
        if tokens <= PAGE_ROWS < made.plan.context:
            yield _decoded_against_prompt(made, tokens)
        for way in [Way(), *ways(chunks, together, randoms, made.target.kind == "cuda")]:
            if time.perf_counter() - started > limit_s:
                return
            got, seconds = _run(made, way, requests)
            yield Outcome(str(way), sum(a == b for a, b in zip(got, expected, strict=True)), len(got), seconds)


def _decoded_against_prompt(made: Dummy, tokens: int) -> Outcome:
    """Replies that end with a page, and prompt + reply as one prompt: the same K/V pages and conv inputs, all bits."""
    started, equal = time.perf_counter(), 0
    most = (made.plan.context - 1) // PAGE_ROWS
    ends = {pages * PAGE_ROWS for pages in (1, (1 + most) // 2, most)}
    lengths = sorted(end - tokens + 1 for end in ends if tokens <= end < made.plan.context)
    with made.engine() as engine:
        for number, length in enumerate(lengths):
            ids = prompt(length, 1000 + number)
            [reply] = ask(engine, [ids], SamplingParams(temperature=0, max_tokens=tokens))
            decoded = _state_bytes(made, length + tokens - 1)
            ask(engine, [[*ids, *reply.tokens[:-1]]], SamplingParams(temperature=0, max_tokens=1))
            equal += decoded == _state_bytes(made, length + tokens - 1)
    return Outcome("decoded rows against prompt rows: states", equal, len(lengths), time.perf_counter() - started)


def _state_bytes(made: Dummy, rows: int) -> bytes:
    """Hash of the K/V pages and conv inputs that the last stream has left; `rows` fill its pages."""
    states, backend = made.states, made.backend
    assert states is not None and rows % PAGE_ROWS == 0
    backend.attach()
    digest = hashlib.blake2b()
    for page in states.page_table[0, : rows // PAGE_ROWS].tolist():  # a stream alone has slot 0
        digest.update(backend.read(states.kv.data[page]).tobytes())
    digest.update(backend.read(states.ring)[:, 0].tobytes())
    return digest.digest()


def _run(made: Dummy, way: Way, requests: list[tuple[list[int], SamplingParams]]) -> tuple[list[str], float]:
    hashes: list[str] = []
    with made.engine(
        kv=way.kv,
        prompt_chunk=way.prompt_chunk,
        shuffle=way.shuffle,
        drafts=way.drafts,
        keeps=way.keeps,
        graphs=way.graphs,
    ) as engine:
        started = time.perf_counter()
        for first in range(0, len(requests), way.together):
            batch = requests[first : first + way.together]
            seeds = range(first, first + len(batch))  # a request keeps its seed, whatever it runs beside
            hashes += map(reply_hash, ask(engine, [ids for ids, _ in batch], [params for _, params in batch], seeds))
        seconds = time.perf_counter() - started
        census = engine.census()
        if not census.clean:
            raise RuntimeError(f"the page pool isn't clean afterwards: {census}")
    return hashes, seconds
