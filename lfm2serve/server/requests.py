"""OpenAI's requests (with vLLM's extra fields): what is honoured, what is harmless, and what is refused by name."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from lfm2serve.chat.tool_choice import ToolUse, check_tool_choice, tool_use
from lfm2serve.errors import InvalidRequest
from lfm2serve.sampling import SamplingParams, StructuredOutputsParams
from lfm2serve.server.errors import from_validation
from lfm2serve.server.group import Prompt
from lfm2serve.structured import Grammar

if TYPE_CHECKING:
    from lfm2serve.runtime import Runtime

MAX_REPLIES = 4096  # prompts times n of one request

# The fields that keep their name; logprobs means another thing in a chat, structured outputs have several names.
SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)} - {"logprobs", "structured_outputs"}

# Fields that name or file a request and don't change its reply.
LABELS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})

# Fields we know and don't honour, with the values that ask for nothing.
INERT: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "priority": (0,),
    "echo": (False,),
    "suffix": (),
    "best_of": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
    "continue_final_message": (False,),
}
CHAT_INERT = INERT | {"add_special_tokens": (False,)}


def _same(value: Any, wanted: Any) -> bool:
    return type(value) is type(wanted) and value == wanted


def screen(body: dict[str, Any], honoured: frozenset[str], inert: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The request without nulls, labels and fields that ask for nothing; InvalidRequest for what isn't honoured."""
    kept = {}
    for name, value in body.items():
        if value is None or (name in LABELS and name not in honoured):
            continue
        if name in honoured or name not in inert:
            kept[name] = value
        elif not any(_same(value, wanted) for wanted in inert[name]):
            allowed = " or ".join(json.dumps(wanted) for wanted in inert[name])
            message = f"{name} is not supported" + (f" except as {allowed}" if allowed else "")
            raise InvalidRequest(message, param=name, code="unsupported_parameter")
    return kept


class Strict(BaseModel):
    """No "1" for 1, no true for 1, no unknown names; null is absent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """The checked request; every complaint is an InvalidRequest that names the field."""
        try:
            return cls.model_validate({name: value for name, value in body.items() if value is not None})
        except ValidationError as error:
            raise from_validation(error) from None


class StreamOptions(Strict):
    include_usage: bool | None = None


class JsonSchema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's: free text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            problem = "is required" if self.json_schema is None else f"doesn't belong to type {self.type}"
            message = f"response_format.json_schema {problem}"
            raise InvalidRequest(message, param="response_format.json_schema")
        return self

    def wanted(self) -> dict[str, Any] | None:
        if self.json_schema is not None:
            return {"json": self.json_schema.schema_}
        return {"json_object": True} if self.type == "json_object" else None


def _schema(value: Any) -> Any:
    if not isinstance(value, dict | str | None):
        raise PydanticCustomError("schema", "should be a JSON schema: an object, or its text")
    return value


SchemaOrText = Annotated[dict[str, Any] | str | None, BeforeValidator(_schema)]


class StructuredOutputs(Strict):
    """vLLM's; see `StructuredOutputsParams`."""

    json_: SchemaOrText = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class _Generation(Strict):
    """What a chat and a completion share. Names are those of SamplingParams wherever they mean the same."""

    inert: ClassVar[dict[str, tuple[Any, ...]]] = INERT

    model: str | None = None
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    draft: bool = True
    prompt_cache: bool = True
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    _structure: tuple[str, StructuredOutputsParams] | None = PrivateAttr(None)  # what it's called, and what it is

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        return super().parse(screen(body, frozenset(cls.model_fields), cls.inert))

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many_stops(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise PydanticCustomError("stop", "should be a string or a list of strings")
        return stops

    @field_validator("logit_bias")
    @classmethod
    def _token_ids_as_keys(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in value or ()):
            raise PydanticCustomError("logit_bias", "keys should be token ids")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs is not supported with stream true", param="prompt_logprobs")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise InvalidRequest(f"max_tokens={self.max_tokens}: must not be negative", param="max_tokens")
        return self

    @model_validator(mode="after")
    def _one_structure(self) -> Self:
        asked: dict[str, dict[str, Any]] = {}
        if self.response_format is not None and (wanted := self.response_format.wanted()) is not None:
            asked["response_format"] = wanted
        if self.structured_outputs is not None:
            asked["structured_outputs"] = self.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        for kind in ("json", "regex", "choice", "grammar"):
            value = getattr(self, f"guided_{kind}")
            if value is not None:
                asked[f"guided_{kind}"] = {kind: value, "whitespace_pattern": self.guided_whitespace_pattern}
        if self.guided_whitespace_pattern is not None and self.guided_json is None:
            name = "guided_whitespace_pattern"
            raise InvalidRequest(f"{name} is only allowed with guided_json", param=name)
        if len(asked) > 1:
            raise InvalidRequest(f"{' and '.join(asked)} can't be combined", param=list(asked)[-1])
        for name, wanted in asked.items():
            try:
                self._structure = name, StructuredOutputsParams(**wanted)
            except InvalidRequest as error:
                message = error.message.replace("structured_outputs", name, 1)
                raise InvalidRequest(message, param=name) from None
        return self

    @property
    def structured(self) -> bool:
        """Whether the replies follow a grammar."""
        return self._structure is not None

    def grammar(self, runtime: Runtime) -> Grammar | None:
        """What the replies follow; compiling it may take a while."""
        param = self._structure[0] if self._structure is not None else None
        return runtime.grammars.grammar(self.params(runtime), None, param)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def fit(self, params: SamplingParams, prompts: Sequence[Prompt], context: int) -> SamplingParams:
        """The parameters for these prompts in a context of so many tokens: the engine refuses what doesn't fit."""
        return params

    @abstractmethod
    def params(self, runtime: Runtime) -> SamplingParams:
        """How the replies are drawn."""

    def _params(self, runtime: Runtime, **more: Any) -> SamplingParams:
        asked = self.model_dump(include=SAMPLING_FIELDS, exclude_none=True) | more
        if "logit_bias" in asked:
            asked["logit_bias"] = {int(token): bias for token, bias in asked["logit_bias"].items()}
        if self._structure is not None:
            asked["structured_outputs"] = self._structure[1]
        return runtime.default_params(**asked)


class ChatRequest(_Generation):
    """POST /v1/chat/completions."""

    inert = CHAT_INERT

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | dict[str, Any] | None, BeforeValidator(check_tool_choice)
    ] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool = True
    _tool_use: ToolUse = PrivateAttr(default_factory=ToolUse)

    @model_validator(mode="after")
    def _chat_rules(self) -> Self:
        self._tool_use = tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise InvalidRequest("max_tokens and max_completion_tokens differ", param="max_completion_tokens")
            self.max_tokens = self.max_completion_tokens
        if self.max_tokens is not None and self.max_tokens < 1:
            name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            raise InvalidRequest(f"{name}={self.max_tokens}: must be at least 1", param=name)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs true", param="top_logprobs")
        return self

    def prompts(self, runtime: Runtime) -> list[Prompt]:
        use = self._tool_use
        conversation = runtime.conversation(
            self.messages,
            prompt_cache=self.prompt_cache,
            tools=use.offered,
            add_generation_prompt=self.add_generation_prompt,
            switches=self._switches(runtime),
        )
        reading = conversation.reading(use, hidden=not self.include_reasoning)
        return [Prompt(conversation.token_ids, conversation=conversation, reading=reading)]

    @property
    def structured(self) -> bool:
        use = self._tool_use
        return self._structure is not None or use.required is not None or use.strict

    def grammar(self, runtime: Runtime) -> Grammar | None:
        param = "tool_choice" if self._structure is None else self._structure[0]
        return runtime.grammars.grammar(self.params(runtime), self._tool_use, param)

    def _switches(self, runtime: Runtime) -> dict[str, Any]:
        """Variables for the template; how much to think is one where the template looks at it."""
        switches = dict(self.chat_template_kwargs)
        check_switches(runtime, switches)
        known = known_switches(runtime)
        if self.enable_thinking is not None:
            _set_thinking(switches, "enable_thinking", self.enable_thinking, "enable_thinking", known)
        if self.reasoning_effort is not None:
            if "reasoning_effort" in known:
                switches.setdefault("reasoning_effort", self.reasoning_effort)
            else:
                thinks = self.reasoning_effort != "none"
                _set_thinking(switches, "enable_thinking", thinks, "reasoning_effort", known)
        return switches

    def params(self, runtime: Runtime) -> SamplingParams:
        if not self.logprobs:
            return self._params(runtime)
        try:
            return self._params(runtime, logprobs=self.top_logprobs or 0)
        except InvalidRequest as error:
            if error.param == "logprobs":
                raise InvalidRequest(f"top_{error.message}", param="top_logprobs") from None
            raise


class CompletionRequest(_Generation):
    """POST /v1/completions."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool = True

    @field_validator("prompt", mode="before")
    @classmethod
    def _text_or_ids(cls, value: Any) -> Any:
        if isinstance(value, str) or _is_ids(value):
            return value
        listed = value if isinstance(value, list) else []
        if listed and (all(isinstance(item, str) for item in listed) or all(_is_ids(item) for item in listed)):
            return value
        rule = "should be a string, a list of strings, a list of token ids or a list of such lists, none of them empty"
        raise PydanticCustomError("prompt", rule)

    @model_validator(mode="after")
    def _completion_rules(self) -> Self:
        if self.best_of not in (None, self.n):
            raise InvalidRequest("best_of is not supported unless it equals n", param="best_of")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens=0: must be at least 1 without echo", param="max_tokens")
        return self

    def prompts(self, runtime: Runtime) -> list[Prompt]:
        one = isinstance(self.prompt, str) or _is_ids(self.prompt)
        listed = [self.prompt] if one else self.prompt
        if len(listed) * self.n > MAX_REPLIES:
            raise InvalidRequest(f"prompts times n is above {MAX_REPLIES}", param="prompt")
        return [self._prompt(runtime, item) for item in listed]

    def _prompt(self, runtime: Runtime, prompt: str | list[int]) -> Prompt:
        if isinstance(prompt, str):
            return Prompt(text_ids(runtime, prompt, self.add_special_tokens), prompt)
        return Prompt(runtime.encode_prompt(prompt))

    def params(self, runtime: Runtime) -> SamplingParams:
        more: dict[str, Any] = {} if self.logprobs is None else {"logprobs": self.logprobs}
        if self.echo and (self.logprobs is not None or self.max_tokens == 0):
            more["prompt_logprobs"] = max(self.prompt_logprobs or 0, self.logprobs or 0)
        return self._params(runtime, **more)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def text_ids(runtime: Runtime, text: str, add_special_tokens: bool) -> list[int]:
    """A raw prompt's token ids, with or without the begin token."""
    ids = runtime.encode_prompt(text, add_special_tokens=add_special_tokens)
    if not ids:
        raise InvalidRequest("prompt: has no tokens", param="prompt")
    return ids


def known_switches(runtime: Runtime) -> frozenset[str]:
    return runtime.template.switches if runtime.template is not None else frozenset()


def _set_thinking(switches: dict[str, Any], switch: str, value: bool, param: str, known: frozenset[str]) -> None:
    if switch not in known:
        message = f"{param}: the chat template has no switch for thinking; include_reasoning false hides the thought"
        raise InvalidRequest(message, param=param, code="unsupported_parameter")
    if switches.setdefault(switch, value) is not value:
        raise InvalidRequest(f"{param} and chat_template_kwargs.{switch} differ", param=param)


def check_switches(runtime: Runtime, switches: dict[str, Any]) -> None:
    """InvalidRequest for what isn't a variable of the checkpoint's chat template."""
    known = known_switches(runtime)
    for name in switches:
        if name not in known:
            param = f"chat_template_kwargs.{name}"
            raise InvalidRequest(f"{param}: the chat template has no such switch ({sorted(known)} are)", param=param)


class TokenizeRequest(Strict):
    """POST /tokenize: a raw prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("exactly one of prompt and messages is required", param="prompt")
        if self.tools and self.messages is None:
            raise InvalidRequest("tools are only allowed with messages", param="tools")
        if self.messages is not None and self.add_special_tokens:
            raise InvalidRequest("add_special_tokens is not supported with messages", param="add_special_tokens")
        return self

    def token_ids(self, runtime: Runtime) -> list[int]:
        if self.messages is not None:
            check_switches(runtime, self.chat_template_kwargs)
            return runtime.encode_chat(
                self.messages,
                tools=tool_use(self.tools).offered,
                add_generation_prompt=self.add_generation_prompt,
                **self.chat_template_kwargs,
            )
        assert self.prompt is not None
        return runtime.encode_prompt(self.prompt, add_special_tokens=self.add_special_tokens is not False)


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
