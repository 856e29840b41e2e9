"""What the dialects' request models share: their complaints, and the fields that no other server has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from lfm2serve.errors import InvalidRequest
from lfm2serve.server.errors import field_path, from_validation
from lfm2serve.server.requests import ChatRequest, Strict, screen

if TYPE_CHECKING:
    from lfm2serve.runtime import Runtime
    from lfm2serve.structured import Grammar

# What protocols define as notes to the server that no reply depends on.
Hint = Annotated[Any, Field(description="Accepted; no reply depends on it.")]
Name = Annotated[str, Field(min_length=1)]


class Body(Strict):
    """A dialect's request. The fields that aren't in its protocol mean what they mean in a chat.

    tags: the types of items by which pydantic tells them apart; it puts them into the paths of its complaints.
    inert: fields that aren't honoured, with the values that ask for nothing.
    """

    tags: ClassVar[frozenset[str]] = frozenset()
    inert: ClassVar[dict[str, tuple[Any, ...]]] = {}

    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    draft: bool = True
    prompt_cache: bool = True

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        try:
            return cls.model_validate(screen(body, frozenset(cls.model_fields), cls.inert))
        except ValidationError as error:
            raise _complaint(error, cls.tags) from None

    def _extras(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Body.model_fields}


def thinking_fields(known: frozenset[str], *, effort: str | None = None, on: bool | None = None) -> dict[str, Any]:
    """The chat's fields for whether (on) and how much (effort) to think, where the template has a switch for it; models
    without one think as they always do."""
    if on is not False and effort is not None and not known.isdisjoint(("reasoning_effort", "enable_thinking")):
        return {"reasoning_effort": effort}
    return {"enable_thinking": on} if on is not None and "enable_thinking" in known else {}


class DialectChat(ChatRequest):
    """The chat that a request comes down to. names: what the dialect calls a chat's fields, for complaints."""

    names: ClassVar[dict[str, str]] = {}

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        with cls._renamed():
            return super().parse({name: value for name, value in body.items() if value is not None})

    def grammar(self, runtime: Runtime) -> Grammar | None:
        with self._renamed():
            return super().grammar(runtime)

    @classmethod
    @contextmanager
    def _renamed(cls) -> Iterator[None]:
        try:
            yield
        except InvalidRequest as error:
            param, message = error.param or "", error.message
            for ours, theirs in cls.names.items():
                if param.startswith(ours):
                    param, message = theirs + param.removeprefix(ours), message.replace(ours, theirs, 1)
            raise InvalidRequest(message, param=param or None, code=error.code) from None


def refuse(at: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{at}: {problem}", param=at)


def list_or_text(item: Callable[[str], dict[str, Any]]) -> tuple[BeforeValidator, Any]:
    """For lists that may also be one string, which stands for the one item that `item` makes of it."""

    def listed(value: Any) -> Any:
        if isinstance(value, str):
            return [item(value)]
        if not isinstance(value, list):
            raise PydanticCustomError("text_or_list", "should be a string or a list of objects")
        return value

    def both(schema: dict[str, Any]) -> None:
        array = {name: schema.pop(name) for name in ("type", "items", "minItems") if name in schema}
        schema["anyOf"] = [{"type": "string"}, array]

    return BeforeValidator(listed), Field(json_schema_extra=both)


def kind_or(default: Callable[[dict[str, Any]], str]) -> Callable[[Any], str | None]:
    """Tells an item's type where it may be left out."""

    def kind(value: Any) -> str | None:
        if not isinstance(value, dict):
            return getattr(value, "type", None)
        return str(value["type"]) if value.get("type") is not None else default(value)

    return kind


def _complaint(error: ValidationError, tags: frozenset[str]) -> InvalidRequest:
    """pydantic's first complaint as one line that names the field."""
    first = error.errors(include_url=False, include_input=False)[0]
    found = first["loc"]
    at = field_path(tuple(part for place, part in enumerate(found) if not _is_tag(found, place, tags)))
    if first["type"] == "union_tag_invalid":
        context = first["ctx"]
        return refuse(f"{at}.type", f"{context['tag'][:64]!r} is not supported; use {context['expected_tags']}")
    if first["type"] == "union_tag_not_found":
        return refuse(f"{at}.type", "is missing")
    plain = from_validation(error)
    return InvalidRequest(plain.message.replace(field_path(found), at, 1), param=at or None, code=plain.code)


def _is_tag(location: tuple[int | str, ...], place: int, tags: frozenset[str]) -> bool:
    """Whether a part of a path is an item's type: it stands between the item's place and what is wrong in it."""
    if not 0 < place < len(location) - 1:
        return False
    return location[place] in tags and (isinstance(location[place - 1], int) or location[place - 1] == "tool_choice")
