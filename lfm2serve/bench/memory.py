"""Where the memory is after loading, and what a pool in pieces costs against one allocation."""

from __future__ import annotations

from dataclasses import dataclass, field

from lfm2serve.bench.dummy import Dummy, ask, dummy, prompt
from lfm2serve.bench.law import reply_hash
from lfm2serve.bench.throughput import Report
from lfm2serve.devices import GIB, Target, find_device
from lfm2serve.engine import Engine
from lfm2serve.options import EngineOptions
from lfm2serve.sampling import SamplingParams

SPREAD = 7  # seed of a page order that spreads leases over the whole pool


@dataclass(slots=True)
class Receipt(Report):
    """One run on one machine. failures: what should have been equal and wasn't."""

    failures: list[str] = field(default_factory=list)

    def expect(self, holds: bool, failure: str) -> None:
        if not holds:
            self.failures.append(failure)


def measure(model: str, options: EngineOptions, *, streams: int, context: int, tokens: int) -> Receipt:
    """Load a model's shape, decode `streams` streams from `context` tokens on, `tokens` each, on pages in pieces and
    in one allocation, next to each other and spread over the pool."""
    before = find_device(options)
    with dummy(model, options) as made:
        report = Receipt(model, made.target.name)
        plan = made.plan
        with made.engine(keeps=True) as engine:
            engine.arena.settle()
            stats = engine.arena.stats()
            beside = f"{stats.mapped / GIB:.2f} of {stats.reserved / GIB:.2f} GiB, {stats.mapped_pieces} pieces"
            report.add("pool mapped after load", 100 * stats.mapped / stats.reserved, "%", beside)
            _used(report, "used after load", before, plan.total - plan.pool + stats.mapped)
            _decode(engine, 1, context, tokens)  # what is loaded at first use is there
            mapped = engine.arena.stats().mapped
            _used(report, "used after a prompt", before, plan.total - plan.pool + mapped)
        rates: dict[tuple[str, int | None], float] = {}
        replies: list[list[str]] = []
        for shuffle in (None, SPREAD):
            for kv in ("paged", "eager"):
                rates[kv, shuffle], hashes = _one(made, kv, shuffle, streams, context, tokens)
                replies.append(hashes)
        for shuffle, where in ((None, "its first pages"), (SPREAD, "pages spread over it")):
            pieces, whole = rates["paged", shuffle], rates["eager", shuffle]
            beside = f"{pieces:,.0f} against {whole:,.0f} tok/s, {streams} streams of {context:,} tokens"
            report.add(f"decode in pieces, against one allocation, {where}", pieces / whole, "x", beside)
        for kv, what in (("paged", "pieces"), ("eager", "one allocation")):
            ratio = rates[kv, SPREAD] / rates[kv, None]
            report.add(f"decode on spread pages, against the first ones, {what}", ratio, "x", "")
        equal = sum(len(set(each)) == 1 for each in zip(*replies, strict=True))
        report.expect(equal == streams, f"{streams - equal} of {streams} replies differ between the four ways")
        report.add("replies equal, pieces and one allocation, first and spread pages", equal, f"of {streams}")
    return report


def _used(report: Report, what: str, before: Target, planned: int) -> None:
    """What the device has given since `before`, beside the plan."""
    if before.kind == "cpu":
        return  # the system gives memory as it is written, and counts other things with it
    from kernels_numba.cuda.driver import Device

    used = before.memory - Device.current().free_bytes()
    beside = f"{used / GIB:.3f} GiB; the plan says {planned / GIB:.3f}"
    report.add(f"{what}, against the plan", used / planned, "x", beside)


def _one(made: Dummy, kv: str, shuffle: int | None, streams: int, context: int, tokens: int) -> tuple[float, list[str]]:
    with made.engine(kv=kv, shuffle=shuffle) as engine:
        return _decode(engine, streams, context, tokens)


def _decode(engine: Engine, streams: int, context: int, tokens: int) -> tuple[float, list[str]]:
    """Tokens a second once all streams have begun to decode, and a hash of each reply."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
    replies = ask(engine, [prompt(context, n) for n in range(streams)], params)
    start, end = max(reply.times[0] for reply in replies), max(reply.times[-1] for reply in replies)
    decoded = sum(at > start for reply in replies for at in reply.times)
    return decoded / (end - start), [reply_hash(reply) for reply in replies]
