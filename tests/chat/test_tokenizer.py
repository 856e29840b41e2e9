"""The tokeniser: control strings as tokens and as text, BOS once, bytes that are exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, processors

from lfm2serve.chat.tokenizer import Tokenizer
from lfm2serve.errors import CheckpointError, InvalidRequest
from tests.chat.conftest import TINY, save, thinking_core

BOS = "<|startoftext|>"
TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("<|>/ abthink_\n🎉日ď"), max_size=60)


def test_raw_prompt_begins_with_one_bos(tokenizer: Tokenizer) -> None:
    bos = tokenizer.bos_token_id
    assert bos == tokenizer.token_id(BOS)
    plain = tokenizer.encode("hi")
    assert bos not in plain
    assert tokenizer.encode("hi", add_special_tokens=True) == [bos, *plain]
    assert tokenizer.encode(f"{BOS}hi", add_special_tokens=True) == [bos, *plain]
    assert tokenizer.encode("", add_special_tokens=True) == [bos]


def test_bos_without_a_post_processor(tmp_path: Path) -> None:
    core = thinking_core()
    core.post_processor = processors.ByteLevel()
    silent = Tokenizer.from_dir(save(core, tmp_path / "silent", bos_token=BOS))
    assert silent.encode("hi", add_special_tokens=True) == silent.encode("hi")
    asked = Tokenizer.from_dir(save(core, tmp_path / "asked", bos_token=BOS, add_bos_token=True))
    assert asked.encode("hi", add_special_tokens=True) == [core.token_to_id(BOS), *asked.encode("hi")]


def test_bos_named_by_the_model_config_only(tmp_path: Path) -> None:
    core = thinking_core()
    core.post_processor = processors.ByteLevel()
    folder = save(core, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"bos_token_id": core.token_to_id(BOS)}))
    assert Tokenizer.from_dir(folder).bos_token_id == core.token_to_id(BOS)


def test_control_strings_are_tokens_or_text(tokenizer: Tokenizer) -> None:
    for text, number in tokenizer.control_tokens.items():
        assert tokenizer.encode(f"a{text}b").count(number) == 1
        plain = tokenizer.encode_plain(f"a{text}b")
        assert not set(plain) & set(tokenizer.control_tokens.values())
        assert tokenizer.decode(plain) == f"a{text}b"
        assert tokenizer.token_id(text) == number
    assert tokenizer.token_id("hi") is None


def test_ordinary_added_words_stay_in_plain_text(tmp_path: Path) -> None:
    core = thinking_core(hole=0)
    core.add_tokens(["Rome"])
    tokenizer = Tokenizer.from_dir(save(core, tmp_path / "words"))
    number = core.token_to_id("Rome")
    assert "Rome" not in tokenizer.control_tokens
    assert number in tokenizer.encode("in Rome") and tokenizer.encode_plain("in Rome") == tokenizer.encode("in Rome")


@settings(deadline=None)
@given(text=TEXTS)
def test_plain_encoding_equals_the_normal_one_without_control_strings(tokenizer: Tokenizer, text: str) -> None:
    if tokenizer.control_pattern.search(text) is None:
        assert tokenizer.encode_plain(text) == tokenizer.encode(text)


@settings(deadline=None)
@given(text=TEXTS)
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_plain(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@settings(deadline=None)
@given(data=st.data())
def test_decode_agrees_with_the_tokenizers_library(data: st.DataObject) -> None:
    tokenizer, core = Tokenizer.from_dir(TINY), Core.from_file(str(TINY / "tokenizer.json"))
    ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=30))
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == core.decode(ids, skip_special_tokens=skip)


def test_special_tokens_are_skipped_on_demand(thinking: Tokenizer) -> None:
    ids = thinking.encode("<|im_start|><think>a</think>b<|im_end|>")
    assert thinking.decode(ids) == "<think>a</think>b"
    assert thinking.decode(ids, skip_special_tokens=False) == "<|im_start|><think>a</think>b<|im_end|>"
    assert thinking.is_special(ids[0]) and not thinking.is_special(ids[1])
    assert thinking.token_text(ids[0]) == "<|im_start|>" and thinking.token_bytes(ids[0]) == b"<|im_start|>"


def test_size_counts_to_the_highest_id_and_holes_have_no_text(thinking: Tokenizer) -> None:
    assert thinking.size == thinking.token_id("</think>") + 1
    hole = thinking.token_id("<|pad|>") - 1
    for number in (hole, thinking.size, thinking.size + 100_000, -1):
        assert thinking.token_bytes(number) == b"" and thinking.token_text(number) == ""
        assert thinking.decode([number, *thinking.encode("A"), number]) == "A"


def test_added_token_beyond_ascii_has_its_own_bytes(tmp_path: Path) -> None:
    core = thinking_core(hole=0)
    core.add_special_tokens(["<|café Ġ|>"])
    tokenizer = Tokenizer.from_dir(save(core, tmp_path / "cafe"))
    number = tokenizer.token_id("<|café Ġ|>")
    assert number is not None and tokenizer.token_bytes(number) == "<|café Ġ|>".encode()


def test_stored_truncation_and_padding_are_off(tmp_path: Path) -> None:
    core = thinking_core()
    core.enable_truncation(4)
    core.enable_padding(length=64)
    tokenizer = Tokenizer.from_dir(save(core, tmp_path / "cut"))
    assert tokenizer.decode(tokenizer.encode("The quick brown fox")) == "The quick brown fox"


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    for encode in (tokenizer.encode, tokenizer.encode_plain):
        with pytest.raises(InvalidRequest, match="surrogate pair at character 2"):
            encode("ab\ud83c")


def test_broken_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not found"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": 1')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a readable tokenizer"):
        Tokenizer.from_dir(tmp_path)
    save(thinking_core(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: must hold a JSON object"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: not readable as JSON"):
        Tokenizer.from_dir(tmp_path)


def test_tokenizers_that_we_cannot_serve_exactly_are_refused(tmp_path: Path) -> None:
    core = thinking_core()
    core.decoder = decoders.Metaspace()
    with pytest.raises(CheckpointError, match=r"Metaspace.*byte-level"):
        Tokenizer.from_dir(save(core, tmp_path))
    bare = Core(models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(CheckpointError, match=r"none.*byte-level"):
        Tokenizer.from_dir(save(bare, tmp_path))
    core = thinking_core()
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A <|im_end|>",
        special_tokens=[(name, core.token_to_id(name)) for name in (BOS, "<|im_end|>")],
    )
    with pytest.raises(CheckpointError, match="post_processor adds 2 tokens"):
        Tokenizer.from_dir(save(core, tmp_path))
    core = thinking_core()
    core.add_special_tokens(["The"])  # also a word of the vocabulary
    with pytest.raises(CheckpointError, match="'The' can't be told from plain text"):
        Tokenizer.from_dir(save(core, tmp_path))
