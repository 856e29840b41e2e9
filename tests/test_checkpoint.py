"""Loading: every layout gives the same bits, and there is no second copy."""

from __future__ import annotations

import itertools
import json
import logging
import struct
import time
import tracemalloc
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_numba.weights import HostWeights
from lfm2serve import tensor_files
from lfm2serve.checkpoint import Checkpoint
from lfm2serve.config import ModelConfig
from lfm2serve.errors import CheckpointError
from lfm2serve.tensor_files import TensorInfo, TensorReader, f32_to_bf16
from tests.checkpoints import (
    FILE,
    NUMPY,
    Raw,
    allocate,
    copy_in_other_layout,
    fuse_experts,
    read_safetensors,
    write_checkpoint,
    write_file,
)
from tests.real_models import MODELS, Published

Buffers = dict[str, np.ndarray]


def load(folder: Path) -> Buffers:
    return Checkpoint(folder).load(allocate)


def assert_same_bits(ours: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    assert set(ours) == set(wanted)
    for name, array in wanted.items():
        assert ours[name].dtype == array.dtype, name
        assert ours[name].shape == array.shape, name
        assert ours[name].tobytes() == array.tobytes(), name


def bits(raw: Raw, shape: tuple[int, ...] | None = None) -> np.ndarray:
    array = np.frombuffer(raw.data, np.uint16 if raw.dtype == "BF16" else np.float32)
    return array.reshape(shape or raw.shape)


def expected(folder: Path) -> Buffers:
    """The buffers, put together from the stored tensors in another way than the loader's."""
    stored = read_safetensors(folder / FILE)
    config = json.loads((folder / "config.json").read_text())
    found = {
        "embed": bits(stored["model.embed_tokens.weight"]),
        "final_norm": bits(stored["model.embedding_norm.weight"]),
    }
    for n, kind in enumerate(config["layer_types"]):
        src, dst = f"model.layers.{n}.", f"layers.{n}."

        def get(name: str, src: str = src) -> np.ndarray:
            return bits(stored[src + name])

        found[dst + "operator_norm"] = get("operator_norm.weight")
        found[dst + "ffn_norm"] = get("ffn_norm.weight")
        if kind == "conv":
            found[dst + "conv.in_proj"] = get("conv.in_proj.weight")
            found[dst + "conv.weight"] = get("conv.conv.weight")[:, 0, :]
            found[dst + "conv.out_proj"] = get("conv.out_proj.weight")
        else:
            found[dst + "attn.qkv"] = np.concatenate([get(f"self_attn.{x}_proj.weight") for x in "qkv"])
            found[dst + "attn.q_norm"] = get("self_attn.q_layernorm.weight")
            found[dst + "attn.k_norm"] = get("self_attn.k_layernorm.weight")
            found[dst + "attn.out"] = get("self_attn.out_proj.weight")
        if src + "feed_forward.gate.weight" in stored:
            experts = range(config["num_experts"])
            found[dst + "moe.gate"] = get("feed_forward.gate.weight")
            found[dst + "moe.bias"] = get("feed_forward.expert_bias")
            pairs = [[get(f"feed_forward.experts.{e}.{w}.weight") for w in ("w1", "w3")] for e in experts]
            found[dst + "moe.w13"] = np.stack([np.concatenate(pair) for pair in pairs])
            found[dst + "moe.w2"] = np.stack([get(f"feed_forward.experts.{e}.w2.weight") for e in experts])
        else:
            found[dst + "mlp.w13"] = np.concatenate([get(f"feed_forward.{w}.weight") for w in ("w1", "w3")])
            found[dst + "mlp.w2"] = get("feed_forward.w2.weight")
    return found


# ---------------------------------------------------------------- the published models, headers only


def published_names(model: Published) -> dict[str, tuple[tuple[int, ...], str]]:
    """Names, shapes and dtypes of a published file, as its hub page lists them."""
    c, config = model.config, ModelConfig.from_dict(model.config)
    h, v, bf = c["hidden_size"], c["vocab_size"], "BF16"
    names = {"model.embed_tokens.weight": ((v, h), bf), "model.embedding_norm.weight": ((h,), bf)}
    for n in range(c["num_hidden_layers"]):
        layer = f"model.layers.{n}."
        names |= {f"{layer}operator_norm.weight": ((h,), bf), f"{layer}ffn_norm.weight": ((h,), bf)}
        if n in config.attention_layers:
            attn = f"{layer}self_attn."
            names |= {f"{attn}{x}_proj.weight": ((h if x == "q" else 512, h), bf) for x in "qkv"}
            names |= {f"{attn}out_proj.weight": ((h, h), bf)}
            names |= {f"{attn}{x}_layernorm.weight": ((64,), bf) for x in "qk"}
        else:
            names |= {f"{layer}conv.in_proj.weight": ((3 * h, h), bf), f"{layer}conv.conv.weight": ((h, 1, 3), bf)}
            names |= {f"{layer}conv.out_proj.weight": ((h, h), bf)}
        feed, inner = f"{layer}feed_forward.", model.intermediate
        prefixes = [feed]
        if c["model_type"] == "lfm2_moe" and n >= 2:
            names |= {
                f"{feed}gate.weight": ((c["num_experts"], h), bf),
                f"{feed}expert_bias": ((c["num_experts"],), "F32"),
            }
            prefixes, inner = [f"{feed}experts.{e}." for e in range(c["num_experts"])], c["moe_intermediate_size"]
        for prefix in prefixes:
            names |= {f"{prefix}w1.weight": ((inner, h), bf), f"{prefix}w3.weight": ((inner, h), bf)}
            names |= {f"{prefix}w2.weight": ((h, inner), bf)}
    return names


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_published_files_are_understood(model: Published, tmp_path: Path) -> None:
    names, header, at = published_names(model), {}, 0
    for name, (shape, dtype) in names.items():
        size = int(np.prod(shape)) * (2 if dtype == "BF16" else 4)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    assert len(names) == model.tensors
    write_file(tmp_path / FILE, json.dumps(header).encode(), b"")
    with (tmp_path / FILE).open("r+b") as stream:  # a sparse file: only the header takes room
        stream.truncate(8 + len(json.dumps(header)) + at)
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    checkpoint = Checkpoint(tmp_path)
    assert len(checkpoint.tensors) == model.tensors
    assert checkpoint.weight_bytes == 2 * model.parameters + 4 * model.bias_values
    assert checkpoint.config.intermediate_size == model.intermediate


# ---------------------------------------------------------------- the same bits from every layout


def test_every_weight_arrives_bit_for_bit(tiny: Path) -> None:
    checkpoint = Checkpoint(tiny)
    loaded = checkpoint.load(allocate)
    assert_same_bits(loaded, expected(tiny))
    assert checkpoint.weight_bytes == sum(array.nbytes for array in loaded.values())
    assert checkpoint.weight_bytes == 2 * checkpoint.config.parameters + 4 * sum(
        array.size for name, array in loaded.items() if name.endswith("moe.bias")
    )


@pytest.mark.parametrize("shards", [1, 2, 7])
def test_shards_fused_experts_and_the_old_dialect(tiny: Path, tmp_path: Path, shards: int) -> None:
    other = copy_in_other_layout(tiny, tmp_path / "other", shards)
    assert_same_bits(load(other), expected(tiny))
    assert Checkpoint(other).config == Checkpoint(tiny).config


def test_a_single_file_is_preferred_to_left_over_shards(tiny: Path, tmp_path: Path) -> None:
    other = copy_in_other_layout(tiny, tmp_path / "other")
    (other / FILE).write_bytes((tiny / FILE).read_bytes())
    for shard in other.glob("model-*.safetensors"):
        shard.unlink()
    assert_same_bits(load(other), expected(tiny))


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_fused_experts_with_either_name(tiny_moe: Path, tmp_path: Path, suffix: str) -> None:
    fused = fuse_experts(read_safetensors(tiny_moe / FILE), suffix)
    assert any(name.endswith("experts.gate_up_proj" + suffix) for name in fused)
    assert_same_bits(load(write_checkpoint(tmp_path, tiny_moe, fused)), expected(tiny_moe))


def test_one_layer_fused_and_another_not(tiny_moe: Path, tmp_path: Path) -> None:
    single = read_safetensors(tiny_moe / FILE)
    fused = fuse_experts(single)
    mixed = {name: raw for name, raw in single.items() if "layers.3." in name}
    mixed |= {name: raw for name, raw in fused.items() if "layers.3." not in name}
    assert_same_bits(load(write_checkpoint(tmp_path, tiny_moe, mixed)), expected(tiny_moe))


def test_names_of_the_text_model_inside_a_vision_model(tiny: Path, tmp_path: Path) -> None:
    stored = read_safetensors(tiny / FILE)
    renamed = {name.replace("model.", "model.language_model.", 1): raw for name, raw in stored.items()}
    assert_same_bits(load(write_checkpoint(tmp_path, tiny, renamed)), expected(tiny))


def test_tensors_in_any_order_of_the_file(tiny: Path, tmp_path: Path) -> None:
    stored = read_safetensors(tiny / FILE)
    backwards = {name: stored[name] for name in sorted(stored, reverse=True)}
    assert_same_bits(load(write_checkpoint(tmp_path, tiny, backwards)), expected(tiny))


@pytest.mark.parametrize("piece", [1000, 1 << 21])
@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_wider_checkpoints_are_rounded_to_bf16(
    tiny: Path,
    tmp_path: Path,
    dtype: str,
    piece: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tensor_files, "CONVERTED", piece)
    generator = np.random.default_rng(5)
    stored, rounded = {}, {}
    for name, raw in read_safetensors(tiny / FILE).items():
        if name.endswith("expert_bias"):
            stored[name] = rounded[name] = raw
            continue
        noise = generator.uniform(1 - 2**-8, 1 + 2**-8, raw.shape)
        stored[name] = Raw.of((raw.floats() * noise).astype(np.float32), dtype)
        rounded[name] = Raw("BF16", raw.shape, nearest_bf16(stored[name].floats()).tobytes())
    reference = write_checkpoint(tmp_path / "reference", tiny, rounded)
    with caplog.at_level(logging.INFO, "lfm2serve"):
        loaded = load(write_checkpoint(tmp_path / "wide", tiny, stored))
    assert_same_bits(loaded, expected(reference))
    assert [r.getMessage() for r in caplog.records] == [f"wide: weights stored as {dtype} are rounded to bfloat16"]


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_a_narrow_expert_bias_is_widened(tiny_moe: Path, tmp_path: Path, dtype: str) -> None:
    stored = read_safetensors(tiny_moe / FILE)
    name = "model.layers.2.feed_forward.expert_bias"
    values = np.array([0.5, -0.25, 1.75, 0.0, -3.0, 0.15625], np.float32)
    stored[name] = Raw.of(values, dtype)
    loaded = load(write_checkpoint(tmp_path, tiny_moe, stored))
    assert loaded["layers.2.moe.bias"].dtype == np.float32
    assert loaded["layers.2.moe.bias"].tolist() == values.tolist()


def nearest_bf16(x: np.ndarray) -> np.ndarray:
    """Bits of the nearest bf16, ties to the even one: by comparing the two neighbours in float64 (finite values)."""
    low = (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    high = low + np.uint16(1)

    def value(b: np.ndarray) -> np.ndarray:
        v = (b.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return np.where(np.isinf(v), np.copysign(2.0**128, v), v)

    below, above = np.abs(x.astype(np.float64) - value(low)), np.abs(value(high) - x.astype(np.float64))
    return np.where((below < above) | ((below == above) & (low % 2 == 0)), low, high)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30))
def test_rounding_is_to_nearest_even(values: list[float]) -> None:
    x = np.array(values, np.float32)
    assert f32_to_bf16(x).tolist() == nearest_bf16(x).tolist()


def test_rounding_at_ties_and_of_special_values() -> None:
    words = np.arange(0x3F80_0000, 0x3F84_0000, 0x4000, np.uint32)
    assert f32_to_bf16(words.view(np.float32)).tolist() == nearest_bf16(words.view(np.float32)).tolist()
    special = np.array([0x7F80_0000, 0xFF80_0000, 0x7F80_0001, 0xFFFF_FFFF, 0x7F7F_FFFF, 0x8000_0000], np.uint32)
    infinity, minus, quiet, negative, overflow, zero = f32_to_bf16(special.view(np.float32)).tolist()
    assert (infinity, minus, overflow, zero) == (0x7F80, 0xFF80, 0x7F80, 0x8000)
    for nan in (quiet, negative):
        assert nan & 0x7F80 == 0x7F80
        assert nan & 0x7F


@pytest.mark.parametrize(
    "changes", [{"block_auto_adjust_ff_dim": False}, {"block_multiple_of": 256}, {"intermediate_size": 6656}]
)
def test_the_tensors_have_the_last_word_on_the_dense_size(
    tiny_dense: Path, tmp_path: Path, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path, tiny_dense, read_safetensors(tiny_dense / FILE), **changes)
    with caplog.at_level(logging.WARNING, "lfm2serve"):
        checkpoint = Checkpoint(folder)
    assert checkpoint.config.intermediate_size == 192
    assert "intermediate_size" in caplog.text
    assert "has 192 rows" in caplog.text
    assert_same_bits(checkpoint.load(allocate), expected(tiny_dense))


def test_metadata_and_a_padded_header_are_fine(tiny: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny, {})
    content = (tiny / FILE).read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size]) | {"__metadata__": {"format": "pt", "note": "x"}}
    write_file(tmp_path / FILE, json.dumps(header).encode() + b" " * 37, content[8 + size :])
    assert_same_bits(load(tmp_path), expected(tiny))


# ---------------------------------------------------------------- output head


def test_an_output_head_equal_to_the_embedding_is_left_out(tiny: Path, tmp_path: Path) -> None:
    stored = read_safetensors(tiny / FILE)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
    assert_same_bits(load(write_checkpoint(tmp_path, tiny, stored)), expected(tiny))


@pytest.mark.parametrize("at", [0, 12345, -1])
@pytest.mark.parametrize("tied", [True, False])
def test_an_output_head_that_differs_is_loaded(tiny: Path, tmp_path: Path, at: int, tied: bool) -> None:
    stored = read_safetensors(tiny / FILE)
    embed = stored["model.embed_tokens.weight"]
    head = np.frombuffer(embed.data, np.uint16).copy()
    head[at] ^= 1
    stored["lm_head.weight"] = Raw("BF16", embed.shape, head.tobytes())
    folder = write_checkpoint(tmp_path, tiny, stored, tie_word_embeddings=tied)
    assert_same_bits(load(folder), expected(tiny) | {"lm_head": head.reshape(embed.shape)})


def test_an_untied_model_needs_its_output_head(tiny: Path, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny, read_safetensors(tiny / FILE), tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"^model\.safetensors: lm_head\.weight is missing"):
        Checkpoint(folder)


# ---------------------------------------------------------------- reading


class RecordingFile(FileIO):
    """A file that remembers which bytes were read."""

    reads: list[tuple[str, int, int]] = []  # noqa: RUF012  reset by each test

    def readinto(self, view: Any) -> int:
        at = self.tell()
        count = super().readinto(view) or 0
        self.reads.append((Path(str(self.name)).name, at, at + count))
        return count


def test_every_byte_is_read_once(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy_in_other_layout(tiny, tmp_path / "other")
    checkpoint = Checkpoint(folder)
    monkeypatch.setattr(tensor_files, "FileIO", RecordingFile)
    monkeypatch.setattr(HostWeights, "piece_bytes", 4096)
    RecordingFile.reads = []
    checkpoint.load(allocate)
    reads = sorted(RecordingFile.reads)
    assert len(reads) > 2 * len(checkpoint.tensors)
    for before, after in itertools.pairwise(reads):
        assert before[0] != after[0] or before[2] == after[1]
    assert sum(end - start for _, start, end in reads) == sum(t.nbytes for t in checkpoint.tensors.values())


class CheckingSink(HostWeights):
    """Holds what is on its way in buffers of its own, filled with rubbish before and after, as a ring of few would."""

    piece_bytes, ahead = 4096, 3

    def __init__(self) -> None:
        super().__init__(allocate)
        self.given: list[tuple[str, int, np.ndarray]] = []
        self.puts = self.most = 0

    def room(self, name: str, start: int, count: int) -> np.ndarray:
        room = np.empty(count, self.tensors[name].dtype)
        assert room.nbytes <= max(self.piece_bytes, self.tensors[name].shape[-1] * room.itemsize)
        room.view(np.uint8)[:] = 0xAA
        self.given.append((name, start, room))
        self.most = max(self.most, len(self.given))
        return room

    def put(self, name: str, start: int, count: int) -> None:
        given, at, room = self.given.pop(0)
        assert (given, at, len(room)) == (name, start, count)
        super().room(name, start, count)[:] = room
        self.puts += 1


@pytest.mark.parametrize("shards", [0, 3])
def test_pieces_are_put_in_the_order_of_the_files_and_few_are_on_their_way(
    tiny: Path, tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(copy_in_other_layout(tiny, tmp_path / "other", shards=shards) if shards else tiny)
    read, slow = tensor_files._File.read, itertools.cycle([0.0, 0.003, 0.0, 0.001])

    def late(self: Any, tensor: Any, at: int, view: memoryview) -> None:
        time.sleep(next(slow))  # readers overtake each other
        read(self, tensor, at, view)

    monkeypatch.setattr(tensor_files._File, "read", late)
    asked: list[tuple[str, int]] = []
    ask = TensorReader.read

    def asking(self: TensorReader, tensor: TensorInfo, first: int, target: np.ndarray) -> Any:
        asked.append((tensor.file.name, tensor.offset + first))
        return ask(self, tensor, first, target)

    monkeypatch.setattr(TensorReader, "read", asking)
    sink = CheckingSink()
    checkpoint.fill(sink)
    assert_same_bits(sink.tensors, expected(tiny))
    assert sink.most == sink.ahead and not sink.given
    assert asked == sorted(asked) and len(asked) == sink.puts


@pytest.mark.parametrize("head", ["none", "equal", "different"])
def test_progress_counts_the_bytes_of_the_files(
    tiny: Path, tmp_path: Path, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostWeights, "piece_bytes", 10_000)
    stored = read_safetensors(tiny / FILE)
    if head != "none":
        raw = stored["model.embed_tokens.weight"]
        stored["lm_head.weight"] = raw if head == "equal" else Raw(raw.dtype, raw.shape, raw.data[:-1] + b"\x11")
    checkpoint = Checkpoint(write_checkpoint(tmp_path, tiny, stored))
    calls: list[tuple[int, int]] = []
    checkpoint.load(allocate, lambda done, total: calls.append((done, total)))
    assert {total for _, total in calls} == {sum(len(raw.data) for raw in stored.values())}
    done = [done for done, _ in calls]
    assert done == sorted(set(done))
    assert calls[-1][0] == calls[-1][1]


@pytest.mark.parametrize(("dtype", "scratch"), [("BF16", 160_000), ("F32", 400_000)])
def test_loading_holds_no_second_copy(
    tiny_moe: Path, tmp_path: Path, dtype: str, scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "CONVERTED", 1024)
    monkeypatch.setattr(HostWeights, "piece_bytes", 16_384)
    stored = read_safetensors(tiny_moe / FILE)
    if dtype == "F32":
        stored = {name: Raw.of(raw.floats()) for name, raw in stored.items()}
    checkpoint = Checkpoint(write_checkpoint(tmp_path, tiny_moe, stored))
    largest = max(tensor.nbytes for tensor in checkpoint.tensors.values())
    assert largest > 2 * scratch or dtype == "F32"
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        buffers = checkpoint.load(allocate)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < checkpoint.weight_bytes + scratch
    assert peak - before < checkpoint.weight_bytes + scratch
    assert sum(array.nbytes for array in buffers.values()) == checkpoint.weight_bytes


def test_the_given_buffers_are_filled_in_place(tiny: Path) -> None:
    given_out: Buffers = {}

    def hand_out(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        assert name not in given_out
        given_out[name] = allocate(name, shape, dtype)
        return given_out[name]

    loaded = Checkpoint(tiny).load(hand_out)
    assert {name: id(array) for name, array in loaded.items()} == {name: id(array) for name, array in given_out.items()}


def test_a_buffer_of_the_wrong_kind_is_refused(tiny: Path) -> None:
    kinds: list[Callable[..., np.ndarray]] = [
        lambda name, shape, dtype: np.empty(shape, np.float64),
        lambda name, shape, dtype: np.empty((*shape, 1), NUMPY[dtype]),
        lambda name, shape, dtype: np.empty((*shape[:-1], 2 * shape[-1]), NUMPY[dtype])[..., ::2],
    ]
    for kind in kinds:
        with pytest.raises(ValueError, match="must give a C-contiguous"):
            Checkpoint(tiny).load(kind)
