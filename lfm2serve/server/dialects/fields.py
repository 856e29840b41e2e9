"""What the dialects' request models share: their complaints, and the fields that no other server has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from lfm2serve.errors import InvalidRequest
from lfm2serve.server.errors import field_path, from_validation
from lfm2serve.server.requests import ChatRequest, Strict

TAGGED = frozenset({"content", "input", "output", "system", "tools"})  # lists whose items are told apart by their type

# What protocols define as notes to the server that no reply depends on.
Hint = Annotated[Any, Field(description="Accepted; no reply depends on it.")]


class Body(Strict):
    """A dialect's request. The fields that aren't in its protocol mean what they mean in a chat."""

    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    chat_template_kwargs: dict[str, Any] = {}
    draft: bool = True
    prompt_cache: bool = True

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        try:
            return cls.model_validate({name: value for name, value in body.items() if value is not None})
        except ValidationError as error:
            raise _complaint(error) from None

    def _extras(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Body.model_fields}


def as_chat(body: dict[str, Any], names: dict[str, str]) -> ChatRequest:
    """The chat that a request comes down to. names: what the dialect calls a chat's fields, for complaints."""
    try:
        return ChatRequest.parse({name: value for name, value in body.items() if value is not None})
    except InvalidRequest as error:
        param, message = error.param or "", error.message
        for ours, theirs in names.items():
            if param.startswith(ours):
                param, message = theirs + param.removeprefix(ours), message.replace(ours, theirs, 1)
        raise InvalidRequest(message, param=param or None, code=error.code) from None


def refuse(at: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{at}: {problem}", param=at)


def text_as(kind: str) -> tuple[BeforeValidator, Any]:
    """For lists of tagged items that may also be one string: it is taken as one item of the type `kind`."""

    def listed(value: Any) -> Any:
        if isinstance(value, str):
            return [{"type": kind, "text": value}]
        if not isinstance(value, list):
            raise PydanticCustomError("text_or_list", "should be a string or a list of objects")
        return value

    def both(schema: dict[str, Any]) -> None:
        array = {name: schema.pop(name) for name in ("type", "items") if name in schema}
        schema["anyOf"] = [{"type": "string"}, array]

    return BeforeValidator(listed), Field(json_schema_extra=both)


def kind_or(default: Callable[[dict[str, Any]], str]) -> Callable[[Any], str | None]:
    """Tells an item's type where it may be left out."""

    def kind(value: Any) -> str | None:
        if not isinstance(value, dict):
            return getattr(value, "type", None)
        return str(value["type"]) if value.get("type") is not None else default(value)

    return kind


def _complaint(error: ValidationError) -> InvalidRequest:
    """pydantic's first complaint, without the types that it puts into the paths of tagged items."""
    first = error.errors(include_url=False, include_input=False)[0]
    at = field_path(_untagged(first["loc"]))
    if first["type"] == "union_tag_invalid":
        context = first["ctx"]
        return refuse(f"{at}.type", f"{context['tag'][:64]!r} is not supported; use {context['expected_tags']}")
    if first["type"] == "union_tag_not_found":
        return refuse(f"{at}.type", "is missing")
    plain = from_validation(error)
    return InvalidRequest(plain.message.replace(field_path(first["loc"]), at, 1), param=at or None, code=plain.code)


def _untagged(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    def is_tag(at: int) -> bool:
        return at >= 2 and isinstance(location[at - 1], int) and location[at - 2] in TAGGED

    return tuple(part for at, part in enumerate(location) if isinstance(part, int) or not is_tag(at))
