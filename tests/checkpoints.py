"""Write checkpoints for tests: safetensors files from raw bytes, and one checkpoint in another layout."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

FILE = "model.safetensors"
NUMPY = {"bf16": np.uint16, "f32": np.float32}


@dataclass(frozen=True)
class Raw:
    """A stored tensor: dtype and shape as the file names them, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, values: np.ndarray, dtype: str = "F32") -> Raw:
        """float32 values as F32, F16 or BF16 (which has to hold them exactly)."""
        values = np.ascontiguousarray(values, np.float32)
        if dtype == "BF16":
            return cls(dtype, values.shape, (values.view(np.uint32) >> 16).astype("<u2").tobytes())
        return cls(dtype, values.shape, values.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes())

    def floats(self) -> np.ndarray:
        """The values, widened to float32."""
        if self.dtype == "BF16":
            return (np.frombuffer(self.data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(self.shape)
        return np.frombuffer(self.data, {"F32": "<f4", "F16": "<f2"}[self.dtype]).astype(np.float32).reshape(self.shape)


def read_safetensors(file: Path) -> dict[str, Raw]:
    """Every tensor of a file, sorted by name; read by the safetensors library."""
    entries = sorted(safetensors.deserialize(file.read_bytes()), key=lambda entry: str(entry[0]))
    return {name: Raw(e["dtype"], tuple(e["shape"]), bytes(e["data"])) for name, e in entries}


def write_safetensors(file: Path, tensors: Mapping[str, Raw]) -> None:
    """A file with the tensors' bytes in the given order."""
    header, at = {}, 0
    for name, raw in tensors.items():
        header[name] = {"dtype": raw.dtype, "shape": list(raw.shape), "data_offsets": [at, at + len(raw.data)]}
        at += len(raw.data)
    write_file(file, json.dumps(header).encode(), b"".join(raw.data for raw in tensors.values()))


def write_file(file: Path, header: bytes, body: bytes) -> None:
    """Header length, header, body: also for broken ones."""
    file.write_bytes(struct.pack("<Q", len(header)) + header + body)


def write_shards(folder: Path, tensors: Mapping[str, Raw], shards: int) -> None:
    """`shards` files of about as many tensors each, and their index."""
    names = list(tensors)
    step = math.ceil(len(names) / shards)
    places = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i * step : (i + 1) * step]}
        write_safetensors(folder / file, part)
        places.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": sum(len(raw.data) for raw in tensors.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def fuse_experts(tensors: Mapping[str, Raw], suffix: str = "") -> dict[str, Raw]:
    """The same tensors with each layer's experts as gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
    fused = {name: raw for name, raw in tensors.items() if ".experts." not in name}
    for gate in [name for name in tensors if name.endswith("feed_forward.gate.weight")]:
        prefix = gate.removesuffix("gate.weight") + "experts."
        experts = tensors[gate].shape[0]
        w1, w2 = tensors[f"{prefix}0.w1.weight"], tensors[f"{prefix}0.w2.weight"]
        up = b"".join(tensors[f"{prefix}{e}.{w}.weight"].data for e in range(experts) for w in ("w1", "w3"))
        down = b"".join(tensors[f"{prefix}{e}.w2.weight"].data for e in range(experts))
        shape = (experts, 2 * w1.shape[0], w1.shape[1])
        fused[f"{prefix}gate_up_proj{suffix}"] = Raw(w1.dtype, shape, up)
        fused[f"{prefix}down_proj{suffix}"] = Raw(w2.dtype, (experts, *w2.shape), down)
    return fused


def old_dialect(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json in the words of 2025: flat theta, full_attn_idxs, torch_dtype, block_ff_dim, tie_embedding."""
    old = dict(config)
    old["full_attn_idxs"] = [n for n, kind in enumerate(old.pop("layer_types")) if kind == "full_attention"]
    old["rope_theta"] = old.pop("rope_parameters")["rope_theta"]
    old["torch_dtype"] = old.pop("dtype")
    old["tie_embedding"] = old.pop("tie_word_embeddings")
    if old["model_type"] == "lfm2":
        old["block_ff_dim"] = old.pop("intermediate_size")
    return old


def copy_in_other_layout(source: Path, target: Path, shards: int = 3) -> Path:
    """The same weights: sharded, experts fused, and the other dialect of config.json."""
    target.mkdir()
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (target / name).write_bytes((source / name).read_bytes())
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(old_dialect(config)))
    write_shards(target, fuse_experts(read_safetensors(source / "model.safetensors")), shards)
    return target


def write_checkpoint(folder: Path, source: Path, tensors: Mapping[str, Raw], **changes: Any) -> Path:
    """`tensors` beside the config.json of `source`, with fields changed."""
    folder.mkdir(exist_ok=True)
    config = json.loads((source / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / FILE, tensors)
    return folder


def allocate(_name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A buffer for `Checkpoint.load`, filled with NaN: what isn't read shows."""
    return np.full(shape, 0x7FFF if dtype == "bf16" else np.nan, NUMPY[dtype])
