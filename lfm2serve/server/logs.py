"""The server's log: one line a record, as text or JSON, with the id of the request that it belongs to."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)


@dataclass(slots=True)
class Record:
    """One request, for the log; endpoints add `fields`."""

    request_id: str
    fields: dict[str, Any] = field(default_factory=dict)


def record_of(scope: Mapping[str, Any]) -> Record:
    record: Record = scope["lfm2serve.record"]
    return record


def request_id_of(record: logging.LogRecord) -> str | None:
    found: str | None = getattr(record, "request_id", None)
    return found or REQUEST_ID.get()


class TextFormatter(logging.Formatter):
    """`LEVEL logger: message key=value ...`"""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802: logging's name
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        if (request_id := request_id_of(record)) is not None:
            fields["request_id"] = request_id
        return " ".join([super().formatMessage(record), *(f"{name}={_short(value)}" for name, value in fields.items())])


def _short(value: Any) -> str:
    return value if isinstance(value, str) and value.isprintable() and " " not in value else json.dumps(value)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, request_id, and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := request_id_of(record)) is not None:
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def start_logging(level: int, style: LogFormat) -> None:
    """Log to standard error: lfm2serve from `level` on, everything else from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("lfm2serve").setLevel(level)
