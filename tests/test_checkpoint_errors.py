"""Every defect of a checkpoint is one readable line that names the file and the tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lfm2serve.checkpoint import Checkpoint
from lfm2serve.errors import CheckpointError
from tests.checkpoints import (
    FILE,
    Raw,
    allocate,
    copy_in_other_layout,
    read_safetensors,
    write_checkpoint,
    write_file,
    write_safetensors,
    write_shards,
)
from tests.conftest import DATA


def refused(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(folder).load(allocate)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_no_such_directory(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "^no such model: .*nowhere")


def test_no_weights(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    refused(tmp_path, r"no model\.safetensors and no model\.safetensors\.index\.json")


EVERY_KIND = [
    "model.embed_tokens.weight",
    "model.embedding_norm.weight",
    "model.layers.0.operator_norm.weight",
    "model.layers.0.ffn_norm.weight",
    "model.layers.0.conv.in_proj.weight",
    "model.layers.0.conv.conv.weight",
    "model.layers.0.conv.out_proj.weight",
    "model.layers.0.feed_forward.w1.weight",
    "model.layers.0.feed_forward.w2.weight",
    "model.layers.0.feed_forward.w3.weight",
    "model.layers.2.self_attn.q_proj.weight",
    "model.layers.2.self_attn.k_proj.weight",
    "model.layers.2.self_attn.v_proj.weight",
    "model.layers.2.self_attn.out_proj.weight",
    "model.layers.2.self_attn.q_layernorm.weight",
    "model.layers.2.self_attn.k_layernorm.weight",
    "model.layers.2.feed_forward.gate.weight",
    "model.layers.2.feed_forward.expert_bias",
    "model.layers.2.feed_forward.experts.5.w1.weight",
    "model.layers.2.feed_forward.experts.5.w2.weight",
    "model.layers.2.feed_forward.experts.5.w3.weight",
]


@pytest.mark.parametrize("name", EVERY_KIND)
def test_a_missing_tensor(tiny_moe: Path, tmp_path: Path, name: str) -> None:
    stored = read_safetensors(tiny_moe / FILE)
    del stored[name]
    refused(write_checkpoint(tmp_path, tiny_moe, stored), rf"^model\.safetensors: {name} is missing")


@pytest.mark.parametrize("name", EVERY_KIND)
def test_a_misshapen_tensor(tiny_moe: Path, tmp_path: Path, name: str) -> None:
    stored = read_safetensors(tiny_moe / FILE)
    raw = stored[name]
    stored[name] = Raw(raw.dtype, (*raw.shape[:-1], raw.shape[-1] * 2), raw.data * 2)
    folder = write_checkpoint(tmp_path, tiny_moe, stored)
    shapes = rf"{list(stored[name].shape)}, config.json wants {list(raw.shape)}".replace("[", r"\[")
    refused(folder, rf"^model\.safetensors: {name} has shape {shapes}")


@pytest.mark.parametrize("name", EVERY_KIND)
def test_a_tensor_of_another_dtype(tiny_moe: Path, tmp_path: Path, name: str) -> None:
    stored = read_safetensors(tiny_moe / FILE)
    raw = stored[name]
    stored[name] = Raw("I8", raw.shape, bytes(int(np.prod(raw.shape))))
    refused(write_checkpoint(tmp_path, tiny_moe, stored), rf"{name} has dtype I8, not BF16, F16, F32")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.conv.conv.bias",
        "model.layers.4.operator_norm.weight",
        "model.layers.2.feed_forward.experts.6.w1.weight",
        "model.layers.2.feed_forward.experts.gate_up_proj",
        "model.vision_tower.weight",
        "something",
    ],
)
def test_an_unexpected_tensor(tiny_moe: Path, tmp_path: Path, name: str) -> None:
    stored = read_safetensors(tiny_moe / FILE) | {name: Raw("BF16", (6, 96, 256), bytes(2 * 6 * 96 * 256))}
    folder = write_checkpoint(tmp_path, tiny_moe, stored)
    fused = name.endswith("gate_up_proj")  # then each expert's own tensors are too many
    named = "model.layers.2.feed_forward.experts.0.w1.weight" if fused else name
    refused(folder, rf"^model\.safetensors: unexpected tensor {named} ")


def test_the_same_tensor_under_two_names(tiny: Path, tmp_path: Path) -> None:
    stored = read_safetensors(tiny / FILE)
    stored["model.language_model.embedding_norm.weight"] = stored["model.embedding_norm.weight"]
    refused(write_checkpoint(tmp_path, tiny, stored), r"embedding_norm\.weight is stored twice, also as")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 400}, r"embed_tokens\.weight has shape \[512, 256\], config.json wants \[400, 256\]"),
        ({"num_key_value_heads": 1}, r"k_proj\.weight has shape \[128, 256\], config.json wants \[64, 256\]"),
        ({"num_experts": 4}, r"gate\.weight has shape \[6, 256\], config.json wants \[4, 256\]"),
        ({"num_experts": 8}, r"gate\.weight has shape \[6, 256\], config.json wants \[8, 256\]"),
        ({"moe_intermediate_size": 64}, r"w1\.weight has shape \[48, 256\], config.json wants \[64, 256\]"),
        ({"intermediate_size": 192}, r"w1\.weight has shape \[160, 256\], config.json wants \[192, 256\]"),
        ({"num_dense_layers": 1}, r"layers\.1\.feed_forward\.gate\.weight is missing"),
        ({"num_dense_layers": 3}, r"layers\.2\.feed_forward\.w1\.weight is missing"),
        ({"use_expert_bias": False}, r"unexpected tensor model\.layers\.2\.feed_forward\.expert_bias"),
        (
            {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "full_attention"]},
            r"unexpected tensor model\.layers\.3\.",
        ),
        (
            {"layer_types": ["full_attention", "conv", "conv", "conv"]},
            r"layers\.0\.self_attn\.q_proj\.weight is missing",
        ),
        ({"hidden_size": 128, "num_attention_heads": 2}, r"has shape \[512, 256\], config.json wants \[512, 128\]"),
    ],
)
def test_a_config_that_disagrees_with_the_tensors(
    tiny_moe: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    refused(write_checkpoint(tmp_path, tiny_moe, read_safetensors(tiny_moe / FILE), **changes), message)


def test_a_dense_size_that_the_kernels_can_not_take(tiny_dense: Path, tmp_path: Path) -> None:
    stored = read_safetensors(tiny_dense / FILE)
    stored["model.layers.0.feed_forward.w1.weight"] = Raw("BF16", (200, 192), bytes(2 * 200 * 192))
    refused(
        write_checkpoint(tmp_path, tiny_dense, stored), r"feed_forward\.w1\.weight has 200 rows, not a multiple of 16"
    )


# ---------------------------------------------------------------- broken files


def entry(**changes: Any) -> bytes:
    """A header of one tensor of 8 bytes, with fields changed."""
    return json.dumps({"model.x": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]} | changes}).encode()


BROKEN_FILES: list[tuple[str, bytes, str]] = [
    ("empty", b"", "header of 0 bytes in a file of 0"),
    ("seven bytes", bytes(7), "header of 0 bytes in a file of 7"),
    ("header longer than the file", struct.pack("<Q", 100) + b"{}", "header of 100 bytes in a file of 10"),
    ("absurd header length", struct.pack("<Q", 2**63) + b"{}", "in a file of 10: truncated or broken"),
    ("a pickle", b"PK\x03\x04" + bytes(100), "truncated or broken"),
    ("no JSON", struct.pack("<Q", 2) + b"{]", "broken header"),
    ("no UTF-8", struct.pack("<Q", 2) + b"\xff\xff", "broken header"),
    ("nested too deep", struct.pack("<Q", 100_000) + b"[" * 100_000, "broken header"),
    ("a list", struct.pack("<Q", 2) + b"[]", "broken header"),
]
BROKEN_HEADERS: list[tuple[str, bytes, int, str]] = [
    ("entry is a list", b'{"model.x": []}', 0, "'model.x': broken header entry"),
    (
        "name with a newline",
        b'{"a\\nb": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}',
        8,
        "broken header entry",
    ),
    ("no dtype", b'{"model.x": {"shape": [4], "data_offsets": [0, 8]}}', 8, "model.x: unknown dtype None"),
    ("unknown dtype", entry(dtype="BF17"), 8, "model.x: unknown dtype 'BF17'"),
    ("shape of text", entry(shape=["4"]), 8, "model.x: broken shape"),
    ("negative shape", entry(shape=[-2, -2]), 8, "model.x: broken shape"),
    ("boolean shape", entry(shape=[4, True]), 8, "model.x: broken shape"),
    ("one offset", entry(data_offsets=[0]), 8, "model.x: broken data_offsets"),
    ("negative offset", entry(data_offsets=[-8, 0]), 8, "model.x: broken data_offsets"),
    ("offsets backwards", entry(data_offsets=[8, 0]), 8, r"model.x: -8 bytes, BF16 \[4\] takes 8"),
    ("too few bytes", entry(data_offsets=[0, 6]), 6, r"model.x: 6 bytes, BF16 \[4\] takes 8"),
    ("huge shape", entry(shape=[2**62, 2**62]), 8, "model.x: 8 bytes"),
    ("data cut off", entry(), 7, "model.x ends at byte .*: truncated"),
    ("data left over", entry(), 9, "1 bytes after the last tensor"),
    ("gap", entry(data_offsets=[2, 10]), 10, "model.x starts at byte"),
    (
        "overlap",
        json.dumps({n: {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]} for n in ("a", "b")}).encode(),
        8,
        "starts at byte",
    ),
    ("twice the same name", entry()[:-1] + b", " + entry()[1:], 8, "'model.x' appears twice"),
]


@pytest.mark.parametrize(("content", "message"), [b[1:] for b in BROKEN_FILES], ids=[b[0] for b in BROKEN_FILES])
def test_a_broken_file(tiny: Path, tmp_path: Path, content: bytes, message: str) -> None:
    write_checkpoint(tmp_path, tiny, {})
    (tmp_path / FILE).write_bytes(content)
    refused(tmp_path, rf"^model\.safetensors: .*{message}")


@pytest.mark.parametrize(
    ("header", "data", "message"), [b[1:] for b in BROKEN_HEADERS], ids=[b[0] for b in BROKEN_HEADERS]
)
def test_a_broken_header(tiny: Path, tmp_path: Path, header: bytes, data: int, message: str) -> None:
    write_checkpoint(tmp_path, tiny, {})
    write_file(tmp_path / FILE, header, bytes(data))
    refused(tmp_path, rf"^model\.safetensors: .*{message}")


def test_a_file_that_can_not_be_opened(tiny: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny, {})
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    refused(tmp_path, r"^model\.safetensors: can't be read")


def test_a_file_that_shrinks_or_goes_between_check_and_load(tiny: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny, read_safetensors(tiny / FILE))
    checkpoint = Checkpoint(tmp_path)
    with (tmp_path / FILE).open("r+b") as stream:
        stream.truncate((tmp_path / FILE).stat().st_size - 5)
    with pytest.raises(CheckpointError, match=r"^model\.safetensors: ends inside model\..*: truncated"):
        checkpoint.load(allocate)
    (tmp_path / FILE).unlink()
    with pytest.raises(CheckpointError, match=r"^model\.safetensors: model\..* can't be read"):
        checkpoint.load(allocate)


CONTENT = (DATA / "tiny-lfm2moe" / FILE).read_bytes()
HEADER_END = 8 + struct.unpack("<Q", CONTENT[:8])[0]


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.integers(0, len(CONTENT) - 1), st.integers(0, HEADER_END), st.integers(0, 16)))
def test_a_file_cut_anywhere_is_refused(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    folder = tmp_path_factory.mktemp("cut")
    write_checkpoint(folder, DATA / "tiny-lfm2moe", {})
    (folder / FILE).write_bytes(CONTENT[:size])
    refused(folder, r"^model\.safetensors: ")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, HEADER_END - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_header_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    write_checkpoint(folder, DATA / "tiny-lfm2moe", {})
    content = bytearray(CONTENT)
    for at, byte in damage:
        content[at] = byte
    (folder / FILE).write_bytes(content)
    try:
        checkpoint = Checkpoint(folder)
    except CheckpointError as error:
        assert "\n" not in str(error)
    else:
        assert checkpoint.weight_bytes == Checkpoint(DATA / "tiny-lfm2moe").weight_bytes


# ---------------------------------------------------------------- shards


@pytest.fixture
def sharded(tiny: Path, tmp_path: Path) -> Path:
    return copy_in_other_layout(tiny, tmp_path / "sharded")


def edit_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


SHARD = "model-00002-of-00003.safetensors"


def test_a_missing_shard(sharded: Path) -> None:
    (sharded / SHARD).unlink()
    refused(sharded, rf"^{SHARD}: missing, but model\.safetensors\.index\.json lists it")


def test_a_truncated_shard(sharded: Path) -> None:
    content = (sharded / SHARD).read_bytes()
    (sharded / SHARD).write_bytes(content[:-1])
    refused(sharded, rf"^{SHARD}: .* ends at byte {len(content)} of {len(content) - 1}: truncated")


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    first = read_safetensors(sharded / "model-00001-of-00003.safetensors")
    second = read_safetensors(sharded / SHARD)
    name = next(iter(first))
    write_safetensors(sharded / SHARD, {**second, name: first[name]})
    refused(sharded, rf"^{SHARD}: {name} is in model-00001-of-00003\.safetensors as well")


def test_a_tensor_that_the_index_does_not_list(sharded: Path) -> None:
    name = next(iter(read_safetensors(sharded / SHARD)))
    edit_index(sharded, lambda index: index["weight_map"].pop(name))
    refused(sharded, rf"^{SHARD}: {name} is not listed for this file")


def test_a_tensor_that_only_the_index_has(sharded: Path) -> None:
    edit_index(sharded, lambda index: index["weight_map"].update({"model.extra.weight": SHARD}))
    refused(sharded, rf"^{SHARD}: model\.extra\.weight is missing, but")


def test_a_missing_tensor_of_shards_names_the_index(tiny: Path, tmp_path: Path) -> None:
    stored = read_safetensors(tiny / FILE)
    del stored["model.embedding_norm.weight"]
    write_checkpoint(tmp_path, tiny, {})
    (tmp_path / FILE).unlink()
    write_shards(tmp_path, stored, 2)
    refused(tmp_path, r"^model\.safetensors\.index\.json: model\.embedding_norm\.weight is missing")


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "", ".", "..", 3, None])
def test_an_index_that_points_out_of_the_directory(sharded: Path, shard: Any) -> None:
    edit_index(sharded, lambda index: index["weight_map"].update({"model.x": shard}))
    refused(sharded, r"^model\.safetensors\.index\.json: weight_map\['model\.x'\]=.* is no file name")


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_a_map(sharded: Path, weight_map: Any) -> None:
    edit_index(sharded, lambda index: index.update(weight_map=weight_map))
    refused(sharded, r"^model\.safetensors\.index\.json: weight_map is missing or empty")
