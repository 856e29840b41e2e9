"""How one reply is drawn and when it ends: SamplingParams, in vLLM's names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from json import loads
from typing import Any, NoReturn

from lfm2serve.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_CHOICES = 128
GREEDY_BELOW = 1e-5  # temperatures below this draw the most likely token, as in vLLM


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """What a reply's text must be; exactly one of the first five. In vLLM's names.

    json: a JSON schema, as an object or its text. regex: matches the whole reply. choice: one of these texts. grammar:
    Lark, or GBNF. json_object: any JSON object. The others are for JSON: no whitespace between its tokens; no
    properties but those that are named; whitespace_pattern: a regex of the whitespace that is allowed (by default one
    space, or a line break and an indent).
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object")
        given = [name for name in kinds if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            _refuse(f"exactly one of {', '.join(kinds)} is wanted, got {', '.join(given) or 'none'}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                _refuse(f"{name} must be a string that isn't empty")
        if self.choice is not None:
            listed = isinstance(self.choice, Sequence) and not isinstance(self.choice, str)
            if not listed or not self.choice or not all(isinstance(text, str) and text for text in self.choice):
                _refuse("choice must be a list of strings, none of them empty")
        if isinstance(self.json, str):
            try:
                loads(self.json)
            except (ValueError, RecursionError) as error:
                _refuse(f"json is not valid JSON: {error}")
        elif self.json is not None and not isinstance(self.json, Mapping):
            _refuse("json must be a schema: an object, or its text")


def _refuse(problem: str) -> NoReturn:
    raise InvalidRequest(f"structured_outputs: {problem}", param="structured_outputs")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one request; unset means off.

    temperature 0 is greedy. top_k 0 or -1: off. Order: logit_bias, repetition / presence / frequency penalty,
    temperature, top_k, top_p, min_p (Hugging Face's order). Ties go to the lower token id.
    seed: draws are Philox(seed, choice index, position); without one a seed is drawn and reported.
    max_tokens None: what the context, the engine's default and the pool allow.
    logprobs / prompt_logprobs: None = off, k = the chosen token's and the k most likely ones', of the raw logits.
    stop: strings that end the reply (left out of the text unless include_stop_str_in_output).
    structured_outputs: what the text must be (behind a chat's thought); needs the extra `structured`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        set_field(self, "stop", stop)
        set_field(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        set_field(self, "top_k", 0 if self.top_k == -1 else self.top_k)

        def check(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise InvalidRequest(f"{name}={getattr(self, name)!r}: {rule}", param=name)

        def whole(name: str, low: int, high: int | None = None, optional: bool = False) -> None:
            value = getattr(self, name)
            if optional and value is None:
                return
            kind = isinstance(value, int) and not isinstance(value, bool)
            bound = f"at least {low}" if high is None else f"between {low} and {high}"
            check(kind and value >= low and (high is None or value <= high), name, f"must be a whole number {bound}")

        def real(name: str, low: float, high: float, open_low: bool = False) -> None:
            value = getattr(self, name)
            kind = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            ok = kind and value <= high and (value > low if open_low else value >= low)
            check(ok, name, f"must be a number {'above' if open_low else 'from'} {low:g} up to {high:g}")

        whole("n", 1, MAX_CHOICES)
        real("temperature", 0.0, 100.0)
        real("top_p", 0.0, 1.0, open_low=True)
        whole("top_k", 0)
        real("min_p", 0.0, 1.0)
        real("repetition_penalty", 0.0, 100.0, open_low=True)
        real("presence_penalty", -2.0, 2.0)
        real("frequency_penalty", -2.0, 2.0)
        whole("seed", -(2**63), 2**64 - 1, optional=True)
        whole("max_tokens", 0, optional=True)
        whole("min_tokens", 0)
        whole("logprobs", 0, MAX_LOGPROBS, optional=True)
        whole("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        structure = self.structured_outputs
        ok = structure is None or isinstance(structure, StructuredOutputsParams)
        check(ok, "structured_outputs", "must be StructuredOutputsParams")
        check(len(stop) <= MAX_STOPS, "stop", f"at most {MAX_STOPS} strings")
        check(all(isinstance(s, str) and s for s in stop), "stop", "must be non-empty strings")
        check(all(isinstance(t, int) and t >= 0 for t in self.stop_token_ids), "stop_token_ids", "must be token ids")
        if self.max_tokens is not None:
            check(self.min_tokens <= self.max_tokens, "min_tokens", f"is above max_tokens={self.max_tokens}")
        for token, value in (self.logit_bias or {}).items():
            ok = isinstance(token, int) and token >= 0 and isinstance(value, int | float) and -100 <= value <= 100
            check(ok, "logit_bias", "must map token ids to numbers between -100 and 100")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def with_(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed (checked again)."""
        return replace(self, **changes)
