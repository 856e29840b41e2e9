"""The checkpoint's tokeniser: text to ids, with and without control tokens, and ids back to bytes and text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from lfm2serve.chat.remembered import Remembered
from lfm2serve.errors import CheckpointError, InvalidRequest


def _latin1_of_alphabet() -> dict[int, int]:
    """The byte-level alphabet, inverted: code point of a symbol -> the byte that it stands for.

    Source: GPT-2's bytes-to-unicode table. Printable Latin-1 bytes stand for themselves, the others follow from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + n: byte for n, byte in enumerate(others)}


ALPHABET = _latin1_of_alphabet()


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint's file; {} where there is no such file. CheckpointError if it is broken."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: must hold a JSON object")
    return value


def token_name(value: object) -> str | None:
    """The text of a special token as tokenizer_config.json writes it: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


class Tokenizer:
    """A byte-level BPE tokeniser (tokenizer.json).

    size: entries, highest id + 1; holes in between decode to nothing. bos_token_id: what a raw prompt begins with.
    control_tokens: text -> id of every added token that isn't an ordinary word or run of spaces; `encode` matches them
    in text and `encode_plain` never does. controls_stand_alone: they match wherever their text is and take nothing
    from beside it, so that a text may be encoded piece by piece.
    """

    def __init__(self, core: tokenizers.Tokenizer, source: str, config: dict[str, Any]) -> None:
        self._core = core
        self._source = source
        core.no_truncation()
        core.no_padding()
        added = core.get_added_tokens_decoder()
        self._added = {token.content: number for number, token in added.items()}
        ordinary = [t for t in added.values() if not t.special and all(c.isalnum() or c.isspace() for c in t.content)]
        names = {token.content for token in ordinary}
        controls = [token for token in added.values() if token.content not in names]
        self.controls_stand_alone = not any(t.lstrip or t.rstrip or t.single_word for t in controls)
        self.control_tokens = {text: number for text, number in self._added.items() if text not in names}
        self._set_tables(core.get_vocab(with_added_tokens=True), added)
        self._set_bos(config)
        self._plain = tokenizers.Tokenizer(core.model)  # shares the vocabulary, knows no added tokens
        if core.normalizer is not None:
            self._plain.normalizer = core.normalizer
        if core.pre_tokenizer is not None:
            self._plain.pre_tokenizer = core.pre_tokenizer
        self._plain.add_tokens(ordinary)
        self.encode_piece = Remembered(self.encode_plain)  # what stands between control tokens
        self.control_pattern = self._control_pattern()

    @classmethod
    def from_dir(cls, path: Path) -> Tokenizer:
        """The tokeniser of a checkpoint directory. CheckpointError: absent, broken, or not byte-level BPE."""
        file = path / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{file}: not found")
        try:
            core = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises a bare Exception
            raise CheckpointError(f"{file}: not a readable tokenizer: {_one_line(error)}") from error
        config = read_json(path / "tokenizer_config.json")
        if token_name(config.get("bos_token")) is None:
            number = read_json(path / "config.json").get("bos_token_id")
            name = core.id_to_token(number) if isinstance(number, int) and number >= 0 else None
            config = {**config, "bos_token": name}
        return cls(core, str(file), config)

    def _set_tables(self, vocab: dict[str, int], added: dict[int, tokenizers.AddedToken]) -> None:
        decoder = json.loads(self._core.decoder.__getstate__()) if self._core.decoder is not None else {}
        kinds = {part.get("type", "none") for part in decoder.get("decoders", [decoder])}
        if not {"ByteLevel"} <= kinds <= {"ByteLevel", "Fuse"}:
            raise CheckpointError(f"{self._source}: decoder {sorted(kinds)}: only byte-level BPE is supported")
        self.size = max(vocab.values()) + 1
        self.bytes_of = [b""] * self.size  # every token's bytes; control tokens have their text
        for text, number in vocab.items():
            try:
                self.bytes_of[number] = text.translate(ALPHABET).encode("latin-1")
            except UnicodeEncodeError:
                self.bytes_of[number] = text.encode()
        for number, token in added.items():
            self.bytes_of[number] = token.content.encode()
        self._special = frozenset(number for number, token in added.items() if token.special)
        self.visible_bytes_of = [b"" if number in self._special else data for number, data in enumerate(self.bytes_of)]

    def _set_bos(self, config: dict[str, Any]) -> None:
        prefix = self._core.encode("", add_special_tokens=True).ids
        if len(prefix) > 1:
            raise CheckpointError(f"{self._source}: post_processor adds {len(prefix)} tokens; one BOS is supported")
        named = self._added.get(token_name(config.get("bos_token")) or "")
        self.bos_token_id: int | None = prefix[0] if prefix else named
        self._adds_bos = bool(prefix) or (named is not None and config.get("add_bos_token") is True)

    def _control_pattern(self) -> re.Pattern[str]:
        """Matches what `encode` takes as a control token, leftmost and longest."""
        for text, number in self.control_tokens.items():
            if number in self.encode_plain(text):
                raise CheckpointError(f"{self._source}: added token {text!r} can't be told from plain text")
        longest_first = sorted(self.control_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text in which control strings are control tokens.

        add_special_tokens: begin with BOS (if this tokeniser does so); a text that already does gets no second one.
        """
        ids = _ids(self._core, text)
        if add_special_tokens and self._adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which control strings are ordinary characters."""
        return _ids(self._plain, text)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids. Invalid UTF-8 becomes U+FFFD; ids that aren't entries have no text."""
        return self.join_bytes(ids, skip_special_tokens).decode("utf-8", "replace")

    def join_bytes(self, ids: Iterable[int], skip_special_tokens: bool) -> bytes:
        """The bytes that the ids stand for, which needn't be whole characters."""
        table, size = self.visible_bytes_of if skip_special_tokens else self.bytes_of, self.size
        return b"".join([table[number] for number in ids if 0 <= number < size])

    def token_id(self, text: str) -> int | None:
        """Id of a text that is exactly one added token, else None."""
        return self._added.get(text)

    def token_bytes(self, number: int) -> bytes:
        return self.bytes_of[number] if 0 <= number < self.size else b""

    def token_text(self, number: int) -> str:
        return self.token_bytes(number).decode("utf-8", "replace")

    def is_special(self, number: int) -> bool:
        return number in self._special

    def __repr__(self) -> str:
        return f"Tokenizer(size={self.size}, bos_token_id={self.bos_token_id})"


def _ids(core: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        ids: list[int] = core.encode_batch_fast([text], add_special_tokens=False)[0].ids
    except TypeError:
        at = next((n for n, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
        if at is None:
            raise
        raise InvalidRequest(f"text isn't valid Unicode: half a surrogate pair at character {at}") from None
    return ids


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
