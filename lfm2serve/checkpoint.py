"""An LFM2 checkpoint: which stored tensor fills which of our buffers, checked before a byte of weights is read."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from kernels_numba.weights import NUMPY, HostWeights, WeightSink, pieces
from lfm2serve.config import CONV_TAPS, K_MULTIPLE, ModelConfig
from lfm2serve.errors import CheckpointError
from lfm2serve.hub import resolve
from lfm2serve.tensor_files import (
    INDEX_FILE,
    ITEM_BYTES,
    READABLE,
    SINGLE_FILE,
    Buffer,
    ByteProgress,
    Shape,
    TensorInfo,
    TensorReader,
    read_headers,
)

__all__ = ["Allocate", "ByteProgress", "Checkpoint", "TensorInfo", "resolve"]

log = logging.getLogger("lfm2serve")

Allocate = Callable[[str, Shape, str], Buffer]
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class _Want:
    """A buffer of ours and the stored tensors (name, shape) that fill it, one after another."""

    buffer: str
    shape: Shape
    stored: Sequence[tuple[str, Shape]]
    dtype: str = "bf16"


@dataclass(frozen=True, slots=True)
class _Part:
    """A stored tensor's place: `size` elements of `buffer` from element `start`."""

    tensor: TensorInfo
    buffer: str
    start: int
    size: int


class Checkpoint:
    """A checkpoint whose headers have been checked against its config.json; `load` or `fill` reads the weights.

    config: what config.json says, the dense feed-forward size being the tensors'. tensors: by stored name.
    weight_bytes: of the buffers that `load` fills. CheckpointError names the file and the tensor or field.
    """

    def __init__(self, path: Path, config: ModelConfig | None = None) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"no such model: {path} is no directory")
        config = config or ModelConfig.from_dir(self.path)
        self.tensors = read_headers(self.path)
        self._left = _short_names(self.tensors)
        self.config = _with_stored_size(config, self._left)
        self._wants = list(_wanted(self.config, self._left))
        self._parts = [part for want in self._wants for part in self._take(want)]
        for tensor in self._left.values():
            raise CheckpointError(f"{tensor.file.name}: unexpected tensor {tensor.name} {list(tensor.shape)}")
        self.weight_bytes = sum(math.prod(want.shape) * NUMPY[want.dtype].itemsize for want in self._wants)

    def _take(self, want: _Want) -> Iterator[_Part]:
        """Find a buffer's stored tensors and check them."""
        start = 0
        for name, shape in want.stored:
            tensor = self._left.pop(name, None)
            if tensor is None:
                file = SINGLE_FILE if (self.path / SINGLE_FILE).exists() else INDEX_FILE
                full = name if name == LM_HEAD else f"model.{name}"
                raise CheckpointError(f"{file}: {full} is missing (config.json wants its shape to be {list(shape)})")
            if tensor.shape != shape:
                raise CheckpointError(
                    f"{tensor.file.name}: {tensor.name} has shape {list(tensor.shape)}, config.json wants {list(shape)}"
                )
            if tensor.dtype not in READABLE:
                raise CheckpointError(
                    f"{tensor.file.name}: {tensor.name} has dtype {tensor.dtype}, not {', '.join(READABLE)}"
                )
            yield _Part(tensor, want.buffer, start, math.prod(shape))
            start += math.prod(shape)

    def load(self, allocate: Allocate, progress: ByteProgress | None = None) -> dict[str, Buffer]:
        """Every weight in host memory, by our names. allocate(name, shape, "bf16" or "f32") gives a C-contiguous array,
        into which the bytes are read (bf16 as uint16; expert biases float32)."""
        sink = HostWeights(allocate)
        self.fill(sink, progress)
        return sink.tensors

    def fill(self, sink: WeightSink, progress: ByteProgress | None = None) -> None:
        """Read the weights into a sink: begun and put in the order of the files, read ahead by several threads.

        `lm_head` is left out where it equals `embed`. progress(bytes done, bytes in all) counts the files' bytes.
        CheckpointError names the file and the tensor that can't be read; the sink is then left as it is.
        """
        wants = {want.buffer: want for want in self._wants}
        rounded = {p.tensor.dtype for p in self._parts if wants[p.buffer].dtype == "bf16"} - {"BF16"}
        if rounded:
            log.info("%s: weights stored as %s are rounded to bfloat16", self.path.name, " and ".join(sorted(rounded)))
        done, total = 0, sum(part.tensor.nbytes for part in self._parts)

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(done, total)

        with TensorReader() as reader:
            parts = sorted(self._parts, key=lambda part: (part.tensor.file.name, part.tensor.offset))
            head = self._equal_head(reader)
            begun: set[str] = set()
            reading: deque[tuple[_Part, int, int, Future[None]]] = deque()

            def put_next() -> None:
                part, first, size, ready = reading.popleft()
                ready.result()
                sink.put(part.buffer, part.start + first, size)
                count(size * ITEM_BYTES[part.tensor.dtype])

            for part in parts:
                if part.tensor is head:
                    continue
                want = wants[part.buffer]
                if part.buffer not in begun:
                    sink.begin(part.buffer, want.shape, want.dtype)
                    begun.add(part.buffer)
                rows = (part.size // want.shape[-1], want.shape[-1])
                for first, size in pieces(rows, NUMPY[want.dtype].itemsize, sink.piece_bytes):
                    if len(reading) == sink.ahead:
                        put_next()
                    room = sink.room(part.buffer, part.start + first, size)
                    reading.append((part, first, size, reader.read(part.tensor, first, room)))
            while reading:
                put_next()
        if head is not None:
            count(head.nbytes)

    def _equal_head(self, reader: TensorReader) -> TensorInfo | None:
        """The stored `lm_head`, if it only repeats the embedding."""
        found = {part.buffer: part.tensor for part in self._parts if part.buffer in ("embed", "lm_head")}
        head = found.get("lm_head")
        return head if head is not None and reader.equal(found["embed"], head) else None


def _short_names(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Tensors by their names without the prefix of the text model (`model.`, or its name inside a VL model)."""
    found: dict[str, TensorInfo] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix("model.").removeprefix("language_model.") if name.startswith("model.") else name
        if short in found:
            raise CheckpointError(f"{tensor.file.name}: {name} is stored twice, also as {found[short].name}")
        found[short] = tensor
    return found


def _with_stored_size(config: ModelConfig, tensors: dict[str, TensorInfo]) -> ModelConfig:
    """The config with the dense feed-forward size of the tensors: exporters disagree about the adjust rule."""
    w1 = tensors.get("layers.0.feed_forward.w1.weight")
    if config.model_type != "lfm2" or w1 is None or len(w1.shape) != 2:
        return config
    size = w1.shape[0]
    if size == 0 or size % K_MULTIPLE:
        raise CheckpointError(f"{w1.file.name}: {w1.name} has {size} rows, not a multiple of {K_MULTIPLE}")
    if size != config.intermediate_size:
        log.warning(
            "config.json: intermediate_size gives a feed-forward size of %d, but %s has %d rows, which are used",
            config.intermediate_size, w1.name, size,
        )  # fmt: skip
    return replace(config, intermediate_size=size)


def _wanted(config: ModelConfig, tensors: dict[str, TensorInfo]) -> Iterator[_Want]:
    """Every buffer of the network, in the order of a forward pass. tensors: to see how the experts are stored."""
    h, vocab = config.hidden_size, config.vocab_size

    def one(buffer: str, name: str, *shape: int, stored: Shape | None = None, dtype: str = "bf16") -> _Want:
        return _Want(buffer, shape, [(name, stored or shape)], dtype)

    yield one("embed", "embed_tokens.weight", vocab, h)
    for n, kind in enumerate(config.layer_types):
        layer = f"layers.{n}."
        yield one(f"{layer}operator_norm", f"{layer}operator_norm.weight", h)
        if kind == "conv":
            yield one(f"{layer}conv.in_proj", f"{layer}conv.in_proj.weight", 3 * h, h)
            taps = (h, 1, CONV_TAPS)
            yield one(f"{layer}conv.weight", f"{layer}conv.conv.weight", h, CONV_TAPS, stored=taps)
            yield one(f"{layer}conv.out_proj", f"{layer}conv.out_proj.weight", h, h)
        else:
            attn, dim = f"{layer}self_attn.", config.head_dim
            rows = (
                ("q", config.num_attention_heads),
                ("k", config.num_key_value_heads),
                ("v", config.num_key_value_heads),
            )
            stored = [(f"{attn}{name}_proj.weight", (heads * dim, h)) for name, heads in rows]
            yield _Want(f"{layer}attn.qkv", (config.qkv_rows, h), stored)
            yield one(f"{layer}attn.q_norm", f"{attn}q_layernorm.weight", dim)
            yield one(f"{layer}attn.k_norm", f"{attn}k_layernorm.weight", dim)
            yield one(f"{layer}attn.out", f"{attn}out_proj.weight", h, config.num_attention_heads * dim)
        yield one(f"{layer}ffn_norm", f"{layer}ffn_norm.weight", h)
        if config.is_moe(n):
            yield from _wanted_experts(config, n, tensors)
        else:
            f, feed = config.intermediate_size, f"{layer}feed_forward."
            stored = [(f"{feed}{name}.weight", (f, h)) for name in ("w1", "w3")]
            yield _Want(f"{layer}mlp.w13", (2 * f, h), stored)
            yield one(f"{layer}mlp.w2", f"{feed}w2.weight", h, f)
    yield one("final_norm", "embedding_norm.weight", h)
    if LM_HEAD in tensors or not config.tie_word_embeddings:
        yield one("lm_head", LM_HEAD, vocab, h)


def _wanted_experts(config: ModelConfig, n: int, tensors: dict[str, TensorInfo]) -> Iterator[_Want]:
    """The router and the experts of one layer, which are stored one by one or fused (as transformers holds them)."""
    h, e, i = config.hidden_size, config.num_experts, config.moe_intermediate_size
    feed, moe = f"layers.{n}.feed_forward.", f"layers.{n}.moe."
    yield _Want(f"{moe}gate", (e, h), [(f"{feed}gate.weight", (e, h))])
    if config.use_expert_bias:
        yield _Want(f"{moe}bias", (e,), [(f"{feed}expert_bias", (e,))], "f32")
    forms = {
        "w13": (
            "gate_up_proj",
            (e, 2 * i, h),
            [(f"{k}.{name}.weight", (i, h)) for k in range(e) for name in ("w1", "w3")],
        ),
        "w2": ("down_proj", (e, h, i), [(f"{k}.w2.weight", (h, i)) for k in range(e)]),
    }
    for buffer, (fused, shape, single) in forms.items():
        names = [name for name in (f"{feed}experts.{fused}", f"{feed}experts.{fused}.weight") if name in tensors]
        stored = [(f"{feed}experts.{name}", part) for name, part in single]
        yield _Want(f"{moe}{buffer}", shape, [(names[0], shape)] if names else stored)
