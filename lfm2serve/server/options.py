"""The settings of the HTTP server, checked once at construction."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lfm2serve.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What a user may set about the server, apart from the engine behind it.

    api_keys: any of them opens everything; none: no key is asked for. max_queue: replies that may wait beyond those
    that can run at once; what comes then is refused with 429. request_timeout_s: from a request's arrival to the end of
    its reply (None: no limit). max_body_mib: of a request. stuck_after_s: a turn of the engine that takes longer makes
    /health fail. cors_origins: origins whose pages may call the server; "*" is all. page: whether / shows one.
    log_prompts: whether the log may hold prompts and replies.
    """

    api_keys: tuple[str, ...] = ()
    max_queue: int = 1024
    request_timeout_s: float | None = None
    max_body_mib: float = 32.0
    stuck_after_s: float = 120.0
    cors_origins: tuple[str, ...] = ()
    page: bool = True
    log_prompts: bool = False

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise InvalidRequest(f"{name}={getattr(self, name)!r}: {rule}", param=name)

        if not all(key and key.isascii() and key.isprintable() and " " not in key for key in self.api_keys):
            raise InvalidRequest("api_keys: a key is visible ASCII without spaces", param="api_keys")
        check(self.max_queue >= 0, "max_queue", "must not be negative")
        timeout = self.request_timeout_s
        check(timeout is None or timeout > 0, "request_timeout_s", "must be positive")
        check(self.max_body_mib > 0, "max_body_mib", "must be positive")
        check(self.stuck_after_s > 0, "stuck_after_s", "must be positive")
        for origin in self.cors_origins:
            scheme, _, rest = origin.partition("://")
            ok = origin == "*" or (scheme in ("http", "https") and rest != "" and "/" not in rest)
            check(ok, "cors_origins", f'{origin!r} is neither "*" nor like https://example.org')

    @property
    def max_body(self) -> int:
        """Bytes."""
        return int(self.max_body_mib * 2**20)


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file: one a line; empty lines and lines that begin with # don't count.

    InvalidRequest: the file can't be read, or has no key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise InvalidRequest(f"--api-key-file {path}: {reason}", param="api_key_file") from None
    keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
    if not keys:
        raise InvalidRequest(f"--api-key-file {path}: has no key", param="api_key_file")
    return keys
