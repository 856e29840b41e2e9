"""A loaded model, ready to serve: what the library, the command line and the server share."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lfm2serve.backend import Backend
from lfm2serve.chat.template import ChatTemplate
from lfm2serve.chat.tokenizer import Tokenizer
from lfm2serve.checkpoint import Checkpoint, resolve
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

log = logging.getLogger("lfm2serve")

ARENA_SLACK = 1 << 20  # each tensor begins on a cache line of its own
ByteProgress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(slots=True)
class Runtime:
    """One model with its tokenizer, chat template (None for base models), engine and memory plan."""

    name: str
    path: Path
    config: ModelConfig
    options: EngineOptions
    tokenizer: Tokenizer
    template: ChatTemplate | None
    generation: GenerationDefaults
    plan: MemoryPlan
    engine: Engine
    backend: Backend

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
) -> Runtime:
    """Find (or download) a checkpoint, plan the memory, read the weights and start the engine.

    model: "demo", a directory or a hub id. progress: told the bytes that are loaded, and shows the hub's own bars.
    """
    options = options or EngineOptions()
    target = find_device(options)
    path = resolve(str(model), offline=offline, progress=progress is not None)
    checkpoint = Checkpoint(path)
    config = checkpoint.config
    dtype = "bfloat16" if options.dtype == "auto" else options.dtype
    options = replace(options, dtype=dtype)
    tokenizer = Tokenizer.from_dir(path)
    if tokenizer.size > config.vocab_size:
        raise CheckpointError(
            f"{path.name}: tokenizer.json has {tokenizer.size} entries, config.json's vocab_size is {config.vocab_size}"
        )
    template = ChatTemplate.from_dir(path, tokenizer)
    generation = GenerationDefaults.from_dir(path)
    plan = make_plan(config, options, checkpoint.weight_bytes, target)
    for purpose, size, remark in plan.table():
        log.info("%-12s %10.1f MiB  %s", purpose, size / 2**20, remark)
    backend = open_backend(target, options, plan.scratch)
    tensors = _load(checkpoint, backend, progress)
    rows = plan.context + SLACK_ROWS
    engine = Engine(
        Model(config, tensors, backend, max_rows=rows),
        StreamStates(
            config,
            backend,
            slots=plan.slots,
            pages=plan.pages,
            max_rows=rows,
            snapshot_pages=plan.snapshot_pages,
        ),
        PagePool(plan.pages, plan.range_pages),
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
    name = str(model).rstrip("/").rsplit("/", 1)[-1] if Path(model).is_dir() else str(model)
    return Runtime(name, path, config, options, tokenizer, template, generation, plan, engine, backend)


def _load(checkpoint: Checkpoint, backend: Backend, progress: ByteProgress | None) -> dict[str, np.ndarray]:
    arena = backend.weight_arena(checkpoint.weight_bytes + ARENA_SLACK)

    def allocate(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return arena.take(shape, np.float32 if dtype == "f32" else np.uint16)

    started = time.monotonic()
    tensors = checkpoint.load(allocate, progress)
    log.info("loaded %d tensors in %.1f s", len(tensors), time.monotonic() - started)
    return tensors
