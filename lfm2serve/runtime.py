"""A loaded model, ready to serve: what the library, the command line and the server share."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lfm2serve.backend import Backend
from lfm2serve.chat.template import ChatTemplate
from lfm2serve.chat.tokenizer import Tokenizer
from lfm2serve.checkpoint import ByteProgress
from lfm2serve.config import GenerationDefaults, ModelConfig
from lfm2serve.conversation import Conversation
from lfm2serve.devices import find_device, open_backend
from lfm2serve.engine import Engine
from lfm2serve.errors import CheckpointError, InvalidRequest
from lfm2serve.memory.pages import SLACK_ROWS, PagePool
from lfm2serve.memory.plan import MemoryPlan, make_plan
from lfm2serve.memory.states import StreamStates
from lfm2serve.model import Model
from lfm2serve.options import EngineOptions
from lfm2serve.sampling import SamplingParams
from lfm2serve.sources import find_source
from lfm2serve.structured import Grammars

log = logging.getLogger("lfm2serve")


@dataclass(slots=True)
class Runtime:
    """One model with its tokenizer, chat template (None for base models), engine and memory plan. path: its directory
    (None: a built-in shape)."""

    name: str
    path: Path | None
    config: ModelConfig
    options: EngineOptions
    tokenizer: Tokenizer
    template: ChatTemplate | None
    generation: GenerationDefaults
    plan: MemoryPlan
    engine: Engine
    backend: Backend
    grammars: Grammars = field(init=False, repr=False)

    def __post_init__(self) -> None:
        eos = {*self.config.eos_token_ids, *self.generation.eos_token_ids}
        self.grammars = Grammars(self.tokenizer, self.config.vocab_size, eos)

    @property
    def memory(self) -> MemoryPlan:
        """Where the memory is now: the plan, with the page pool as it is mapped."""
        return self.plan.with_mapped(self.engine.arena.stats().mapped)

    def default_params(self, **overrides: Any) -> SamplingParams:
        """SamplingParams with generation_config.json's values where `overrides` has none."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        defaults = {name: value for name in names if (value := getattr(self.generation, name)) is not None}
        return SamplingParams(**{**defaults, **overrides})

    def encode_prompt(self, prompt: str | Sequence[int], *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a raw prompt (BOS added once); ids are taken as they are."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        return list(prompt)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **switches: Any,
    ) -> list[int]:
        """Token ids of a conversation. InvalidRequest: no chat template, or messages that it can't render."""
        return self._chat_template().encode(
            list(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            **switches,
        )

    def conversation(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        prompt_cache: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        switches: Mapping[str, Any] | None = None,
    ) -> Conversation:
        """A chat to be answered, with what the prompt cache has to know of it. Errors as in `encode_chat`."""
        return Conversation(
            self._chat_template(),
            self.engine,
            messages,
            keeps=prompt_cache and self.plan.snapshot_pages > 0,
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            switches=switches,
        )

    def _chat_template(self) -> ChatTemplate:
        if self.template is None:
            raise InvalidRequest(f"{self.name} has no chat template; send raw prompts", param="messages")
        return self.template

    def close(self) -> None:
        """End the engine and free weights and pages. Idempotent."""
        self.engine.close()
        self.backend.close()


def new_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbits(63)


def load_runtime(
    model: str | Path,
    options: EngineOptions | None = None,
    *,
    offline: bool = False,
    progress: ByteProgress | None = None,
    dummy_weights: bool = False,
) -> Runtime:
    """Find (or download) a checkpoint, plan the memory, read the weights and start the engine.

    model: "demo", a directory or a hub id. progress: told the bytes that are loaded, and shows the hub's own bars.
    dummy_weights: random ones (see `find_source` for what `model` may then be).
    """
    options = options or EngineOptions()
    target = find_device(options)
    source = find_source(str(model), offline=offline, progress=progress is not None, dummy_weights=dummy_weights)
    config, tokenizer, generation = source.config, source.tokenizer, source.generation
    dtype = "bfloat16" if options.dtype == "auto" else options.dtype
    options = replace(options, dtype=dtype)
    if tokenizer.size > config.vocab_size:
        raise CheckpointError(
            f"{model}: tokenizer.json has {tokenizer.size} entries, config.json's vocab_size is {config.vocab_size}"
        )
    plan = make_plan(config, options, source.weight_bytes, target)
    for line in str(plan).splitlines():
        log.info("%s", line)
    backend = open_backend(target, options, plan.scratch)
    try:
        started = time.monotonic()
        rows = plan.context + SLACK_ROWS
        network = Model(config, source.weights(backend, progress), backend, max_rows=rows)
        log.info("%d weights in place after %.1f s", source.tensors, time.monotonic() - started)
        states = StreamStates(
            config, backend, slots=plan.slots, pages=plan.pages, max_rows=rows, snapshot_pages=plan.snapshot_pages,
            lazy=options.kv != "eager",
        )  # fmt: skip
        pool = PagePool(plan.pages, plan.range_pages)
        states.arena.ahead(pool.upcoming(), plan.first_pieces)
        engine = Engine(
            network,
            states,
            pool,
            slots=plan.slots,
            context=plan.context,
            vocab=tokenizer.size,
            eos_token_ids={*config.eos_token_ids, *generation.eos_token_ids},
            default_max_tokens=options.default_max_tokens,
            prompt_chunk=options.prompt_chunk,
            largest_chunk=target.chunk,
            max_gap_ms=options.max_gap_ms,
            drafts=options.drafts,
            warm_pass=options.warm_pass,
        )
    except BaseException:
        backend.close()
        raise
    name = str(model).rstrip("/").rsplit("/", 1)[-1] if Path(model).is_dir() else str(model)
    return Runtime(name, source.path, config, options, tokenizer, source.template, generation, plan, engine, backend)
