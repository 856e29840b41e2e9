"""The library face: LLM(...).generate / chat / stream, in the names and shapes of vLLM's offline API."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lfm2serve.chat.reply_parts import Reading
from lfm2serve.chat.tokenizer import Tokenizer
from lfm2serve.chat.tool_choice import ToolUse, tool_use
from lfm2serve.conversation import Conversation
from lfm2serve.counters import CacheStats
from lfm2serve.engine import Engine
from lfm2serve.errors import EngineDead, InvalidRequest
from lfm2serve.memory.pages import Census
from lfm2serve.memory.plan import MemoryPlan
from lfm2serve.options import EngineOptions
from lfm2serve.outputs import RequestOutput
from lfm2serve.replies import Replies, Request
from lfm2serve.reply import ReplyDelta
from lfm2serve.runtime import Runtime, load_runtime, new_seed
from lfm2serve.sampling import SamplingParams
from lfm2serve.terminal import LoadProgress, ProgressLine, announce_compiling

Message = Mapping[str, Any]
Messages = Sequence[Message]
Prompt = str | Sequence[int] | Mapping[str, Any]
Tools = Sequence[dict[str, Any]] | None
ToolChoice = str | Mapping[str, Any] | None
Params = SamplingParams | Sequence[SamplingParams] | None

VLLM_NAMES = {"max_model_len": "context", "max_num_seqs": "max_streams"}


class LLM:
    """A loaded LFM2 model that answers many prompts at once.

    model: "demo", a directory, or a hub id. offline: never ask the hub. progress: show the loading on standard error.
    dummy_weights: random weights, for planning and measuring; `model` may then be the name of a built-in shape (such as
    "lfm2-1.2b") or a directory with no more than config.json.
    options: the fields of EngineOptions (device, dtype, context, max_streams, kv, kv_pages, ...); vLLM's
    `max_model_len` and `max_num_seqs` are taken as `context` and `max_streams`.

    Raises CheckpointError, DeviceError, MemoryPlanError or InvalidRequest, each one readable line. `close()`, or
    leaving a `with` block, gives its memory back without ending the process. Methods may be called from any thread.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        offline: bool = False,
        progress: bool = True,
        dummy_weights: bool = False,
        **options: Any,
    ) -> None:
        renamed = {VLLM_NAMES.get(name, name): value for name, value in options.items()}
        if len(renamed) < len(options):
            raise InvalidRequest(f"an option is given under two names: {', '.join(sorted(options))}", param="options")
        self._runtime: Runtime | None = None
        if progress:
            announce_compiling()
        runtime = load_runtime(
            Path(model) if isinstance(model, os.PathLike) else model,
            EngineOptions.from_dict(renamed),
            offline=offline,
            progress=LoadProgress(enabled=progress),
            dummy_weights=dummy_weights,
        )
        self._runtime = runtime
        self._numbers = itertools.count()
        self._finalizer = weakref.finalize(self, runtime.close)

    # ---- asking ----

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        prompt_cache: bool = True,
        draft: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; the results are in the prompts' order.

        A prompt is text, token ids, {"prompt": text} or {"prompt_token_ids": ids}. sampling_params: one for all or one
        each; None takes the checkpoint's defaults. use_tqdm: show a progress bar over several prompts. prompt_cache:
        resume and keep states. draft: draft tokens by lookup. Neither changes a reply.

        A prompt that can't be served raises InvalidRequest before any of them runs. KeyboardInterrupt cancels the
        call's requests, waits for their end and is raised again; the LLM stays usable.
        """
        runtime = self._open_runtime()
        encoded = [_encode_prompt(runtime, prompt) for prompt in _prompt_list(prompts)]
        return self._run(encoded, sampling_params, use_tqdm, prompt_cache, draft)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        tools: Tools = None,
        tool_choice: ToolChoice = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        prompt_cache: bool = True,
        draft: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or many, through the checkpoint's chat template.

        Results, parameters and errors as in `generate`; a reply's thought and tool calls stand beside its text. tools,
        tool_choice: as in OpenAI's API. chat_template_kwargs: variables for the template.
        """
        runtime = self._open_runtime()
        use = tool_use(tools, tool_choice)
        encoded = [
            _encode_chat(runtime, conversation, use, add_generation_prompt, chat_template_kwargs, prompt_cache)
            for conversation in _conversation_list(messages)
        ]
        return self._run(encoded, sampling_params, use_tqdm, prompt_cache, draft)

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Tools = None,
        tool_choice: ToolChoice = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        prompt_cache: bool = True,
        draft: bool = True,
    ) -> ReplyStream:
        """Answer one prompt (as in `generate`) or one conversation (as in `chat`) piece by piece.

        for delta in llm.stream("Once upon a time"): print(delta.text, end="")

        Leaving the loop early cancels the reply. sampling_params.n must be 1.
        """
        runtime = self._open_runtime()
        params = sampling_params or runtime.default_params()
        if params.n != 1:
            raise InvalidRequest(f"n={params.n}: a stream gives one reply", param="n")
        if _is_conversation(prompt):
            use = tool_use(tools, tool_choice)
            encoded = _encode_chat(runtime, prompt, use, True, chat_template_kwargs, prompt_cache)
        else:
            encoded = _encode_prompt(runtime, prompt)
        return ReplyStream(runtime, self._request(encoded, params, prompt_cache, draft))

    @property
    def name(self) -> str:
        return self._open_runtime().name

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` works: base models have no template."""
        return self._open_runtime().template is not None

    def get_default_sampling_params(self) -> SamplingParams:
        """What a call without sampling_params uses: the checkpoint's generation_config.json."""
        return self._open_runtime().default_params()

    def get_tokenizer(self) -> Tokenizer:
        return self._open_runtime().tokenizer

    @property
    def memory(self) -> MemoryPlan:
        """Where the memory is: a table in a notebook, `str(...)` elsewhere, `to_dict()` for numbers."""
        return self._open_runtime().memory

    def census(self) -> Census:
        """Who holds which K/V pages at this moment."""
        return self._open_runtime().engine.census()

    @property
    def prompt_cache(self) -> PromptCacheView:
        """The kept states: what they hold and did, and a way to drop them."""
        return PromptCacheView(self._open_runtime().engine)

    # ---- living ----

    def close(self) -> None:
        """Cancel what runs and give all memory back. Idempotent; the LLM can't be used afterwards."""
        self._finalizer()
        self._runtime = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        runtime = self._runtime
        if runtime is None:
            return "LLM(closed)"
        config, engine = runtime.config, runtime.engine
        return (
            f"LLM({runtime.name!r}, {config.model_type}, {config.parameters / 1e6:,.1f}M parameters, "
            f"context={engine.context}, kv_pages={engine.census().total})"
        )

    # ---- inside ----

    def _open_runtime(self) -> Runtime:
        if self._runtime is None:
            raise EngineDead("this LLM is closed")
        return self._runtime

    def _request(self, prompt: _Encoded, params: SamplingParams, prompt_cache: bool, draft: bool) -> Request:
        return Request(
            request_id=str(next(self._numbers)),
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            params=params,
            seed=new_seed() if params.seed is None else params.seed,
            conversation=prompt.conversation,
            reading=prompt.reading,
            grammar=self._open_runtime().grammars.grammar(params, prompt.use),
            prompt_cache=prompt_cache,
            draft=draft,
        )

    def _run(
        self, prompts: Sequence[_Encoded], sampling_params: Params, use_tqdm: bool, prompt_cache: bool, draft: bool
    ) -> list[RequestOutput]:
        runtime = self._open_runtime()
        params = _params_list(runtime.default_params() if sampling_params is None else sampling_params, len(prompts))
        requests = [self._request(prompt, p, prompt_cache, draft) for prompt, p in zip(prompts, params, strict=True)]
        replies = Replies(runtime, requests)
        total, tokens = len(requests), 0
        with ProgressLine("Prompts", total, enabled=use_tqdm and total > 1) as progress:
            replies.start()
            while not replies.ended:
                _, delta = replies.next()
                tokens += len(delta.token_ids)
                done = replies.ended_requests
                progress.update(done, f"{done}/{total}, {tokens / max(progress.elapsed, 1e-3):,.0f} tokens/s,")
        return [request.output() for request in requests]


class ReplyStream:
    """An iterator over one running reply; each item is a ReplyDelta (text, reasoning, tool_calls, token_ids, logprobs,
    finish_reason).

    `output` is the whole reply so far. `close()` (or leaving a `with` block) cancels what is left and waits until its
    memory is back; dropping the object cancels too.
    """

    def __init__(self, runtime: Runtime, request: Request) -> None:
        self._request = request
        self._replies = Replies(runtime, [request])
        self._replies.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ReplyDelta:
        while not self._replies.ended:
            _, delta = self._replies.next()
            if delta.text or delta.reasoning or delta.tool_calls or delta.token_ids or delta.finish_reason is not None:
                return delta
        raise StopIteration

    @property
    def seed(self) -> int:
        return self._request.seed

    @property
    def output(self) -> RequestOutput:
        return self._request.output()

    def close(self) -> None:
        self._replies.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_replies"):
            self._replies.cancel(wait=False)  # the collector may run on any thread, the engine's too


class PromptCacheView:
    """The prompt cache of an LLM."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def stats(self) -> CacheStats:
        """States, bytes held and spare, and the counters by kind of mark, at this moment."""
        return self._engine.stats().cache

    def clear(self) -> int:
        """Drop every kept state that isn't in use; returns how many."""
        return self._engine.clear_prompt_cache()

    def __repr__(self) -> str:
        stats = self.stats()
        mib = f"{stats.held_bytes / 2**20:,.0f} MiB held, {stats.spare_bytes / 2**20:,.0f} MiB spare"
        return f"prompt cache: {stats.states} states, {mib}, {stats.counters.hits.total()} hits"


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A prompt: its text (None where ids were given), its ids, and the conversation that it is of, if any, with how its
    replies are read and which tools they may use."""

    text: str | None
    token_ids: list[int]
    conversation: Conversation | None = None
    reading: Reading | None = None
    use: ToolUse | None = None


def _is_list(value: object) -> bool:
    """A list, tuple or the like; text is none."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_token_ids(value: Any) -> bool:
    return _is_list(value) and len(value) > 0 and all(_is_whole_number(item) for item in value)


def _is_whole_number(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _is_conversation(value: Any) -> bool:
    return _is_list(value) and len(value) > 0 and all(isinstance(item, Mapping) and "role" in item for item in value)


def _prompt_list(prompts: Any) -> Sequence[Any]:
    """The prompts of a call, where a single one may stand without a list around it."""
    if isinstance(prompts, str | Mapping) or _is_token_ids(prompts):
        return [prompts]
    if not _is_list(prompts):
        kind = type(prompts).__name__
        raise InvalidRequest(f"prompts: want text, token ids or a list of them, got {kind}", param="prompts")
    return list(prompts)


def _encode_prompt(runtime: Runtime, prompt: Any) -> _Encoded:
    if isinstance(prompt, Mapping):
        fields = {name: value for name, value in prompt.items() if value is not None}
        if len(fields) != 1 or next(iter(fields)) not in ("prompt", "prompt_token_ids"):
            names = ", ".join(map(str, fields))
            raise InvalidRequest(f"prompts: a dict holds 'prompt' or 'prompt_token_ids', got: {names}", param="prompts")
        [prompt] = fields.values()
    if isinstance(prompt, str):
        return _Encoded(prompt, runtime.encode_prompt(prompt))
    if not _is_token_ids(prompt):
        raise InvalidRequest(f"prompts: {prompt!r:.60} is neither text nor token ids", param="prompts")
    return _Encoded(None, runtime.encode_prompt([int(token) for token in prompt]))


def _conversation_list(messages: Any) -> Sequence[Any]:
    """The conversations of a call, where a single one may stand without a list around it."""
    if _is_list(messages) and messages and all(isinstance(item, Mapping) for item in messages):
        return [messages]
    if not _is_list(messages) or not all(_is_list(item) and item for item in messages):
        raise InvalidRequest(
            "messages: want a list of {'role': ..., 'content': ...}, or a list of such lists", param="messages"
        )
    return list(messages)


def _encode_chat(
    runtime: Runtime,
    messages: Any,
    use: ToolUse,
    add_generation_prompt: bool,
    switches: Mapping[str, Any] | None,
    prompt_cache: bool,
) -> _Encoded:
    conversation = runtime.conversation(
        list(messages),
        prompt_cache=prompt_cache,
        tools=use.offered,
        add_generation_prompt=add_generation_prompt,
        switches=switches,
    )
    ids = conversation.token_ids
    text = runtime.tokenizer.decode(ids, skip_special_tokens=False)
    return _Encoded(text, ids, conversation, conversation.reading(use), use)


def _params_list(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    each = [params] * count if isinstance(params, SamplingParams) else list(params)
    if len(each) != count:
        raise InvalidRequest(f"sampling_params: {len(each)} for {count} prompts", param="sampling_params")
    return each
