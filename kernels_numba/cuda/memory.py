"""What a CUDA backend holds on the device, and how work and data get there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..batch import PAGE_ROWS, RING_ROWS
from ..weights import put_array
from . import copies as _copies
from . import random_weights as _random
from . import rope as _rope
from .compiler import Kernel
from .driver import Device, DeviceArray
from .inputs import Uploads, packed_bytes
from .loading import DeviceWeights, stays_on_host
from .pack import PackedWeight, packed_elements
from .pieces import ReservedRange
from .products import BLOCK_K, UNIT
from .scratch import Activations, Scratch

HEAD = _rope.HEAD
UPLOAD_BYTES = 4 << 20
PLAN_BYTES = 256 << 10
"""of the runs of one `copy`: enough for a state of 128,000 tokens"""
PLANS = 40
"""copies that wait for no earlier one: those of sixteen states kept of one step, and some more"""


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of every attention layer in pages of PAGE_ROWS positions: bf16
    [pages, layers, 2, kv_heads, PAGE_ROWS * 64]; a page is one run of memory (its inner order: see rope.py).

    mapper: gives parts of it their memory, before they are used; None where all of it has."""

    data: DeviceArray
    mapper: ReservedRange | None = None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def page_bytes(self) -> int:
        return self.data.row_bytes


class PenaltyTables:
    """Which tokens each slot's prompt holds and how often its reply does, on the device. `shape` [slots, width]."""

    def __init__(self, backend: DeviceMemory, slots: int, width: int) -> None:
        self._backend = backend
        self.shape = (slots, width)
        self.prompt_seen = backend.allocate((slots, width), "u8")
        self.output_count = backend.allocate((slots, width), "i32")
        self._waiting: list[tuple[int, int]] = []

    @property
    def views(self) -> tuple[PenaltyTables, PenaltyTables]:
        """SampleRows' prompt_seen and output_count."""
        return self, self

    def open(self, slot: int, prompt: Sequence[int]) -> None:
        """Forget a slot's last owner and take in a prompt."""
        be = self._backend
        self._waiting = [(s, token) for s, token in self._waiting if s != slot]
        be.device.fill(self.prompt_seen[slot], 0, be.stream)
        be.device.fill(self.output_count[slot], 0, be.stream)
        ids, owner = be.send(np.asarray(prompt, np.int32))
        be.launch(_copies.mark_tokens, 32, _copies.THREADS, ids, len(prompt), self.prompt_seen[slot])
        del owner

    def record(self, slot: int, token: int) -> None:
        """Count a token of a slot's reply; takes effect before the next draw."""
        self._waiting.append((slot, token))

    def flush(self) -> None:
        """Queue what was recorded."""
        if self._waiting:
            be, waiting = self._backend, np.array(self._waiting, np.int32)
            self._waiting = []
            slots, ids, owner = be.send(waiting[:, 0], waiting[:, 1])
            be.launch(
                _copies.count_tokens, 1, _copies.THREADS, slots, ids, len(waiting), self.shape[1], self.output_count
            )
            del owner


class DeviceMemory:
    """One GPU, one stream, scratch memory for a step, and everything that is kept until `close`."""

    def __init__(self, ordinal: int, scratch_bytes: int) -> None:
        self.device = Device.open(ordinal)
        self.stream = self.device.stream()
        self._owned: dict[int, DeviceArray] = {}
        self._ranges: dict[int, ReservedRange] = {}
        self._tables: PenaltyTables | None = None
        self.scratch = Scratch(self.allocate((scratch_bytes,), "u8"))
        self.uploads = Uploads(self.device, self.stream, UPLOAD_BYTES)
        self._plans = Uploads(self.device, self.stream, PLAN_BYTES, PLANS)
        self.dependent = False
        """whether kernels may start before the one queued before has ended (programmatic dependent launch)"""

    def launch(
        self, kernel: Kernel, grid: int | tuple[int, ...], threads: int, *arguments: Any, shared: int = 0
    ) -> None:
        """Queue a kernel."""
        self.device.function(kernel).bind(grid, threads, arguments, shared=shared, dependent=self.dependent).run(
            self.stream
        )

    def send(self, *arrays: NDArray[Any]) -> list[Any]:
        """Host arrays on the device, and last what holds their memory."""
        owner = self.scratch.take((packed_bytes(arrays),), "u8")
        return [*self.uploads.send(arrays, owner.array), owner]

    def allocate(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        """Memory until `close`."""
        array = self._owned[array.pointer] = self.device.allocate(shape, dtype)
        return array

    def free(self, array: DeviceArray | KVCache) -> None:
        """Give back memory before `close`; waits for what is queued."""
        self.stream.synchronize()
        array = array.data if isinstance(array, KVCache) else array
        if array.pointer in self._ranges:
            self._ranges.pop(array.pointer).close()
        else:
            self.device.free(self._owned.pop(array.pointer))

    def keep(self, host: NDArray[Any]) -> DeviceArray:
        array = self.device.to_device(host)
        self._owned[array.pointer] = array
        return array

    def close(self) -> None:
        """Wait for what is queued and free the device's memory. Idempotent; the backend can't be used any more."""
        self.device.make_current()
        self.stream.synchronize()
        for array in self._owned.values():
            self.device.free(array)
        for reserved in self._ranges.values():
            reserved.close()
        self._owned, self._ranges = {}, {}
        self.uploads.close()
        self._plans.close()

    def read(self, array: Activations | DeviceArray) -> NDArray[Any]:
        """An array on the host (bf16 as uint16); waits for it."""
        given = array.array if isinstance(array, Activations) else array  # queues what was put off
        self.stream.synchronize()
        return self.device.read(given)

    def weight_sink(self, nbytes: int) -> DeviceWeights:
        """Takes a checkpoint's weights; see `WeightSink`."""
        return DeviceWeights(self)

    def upload(self, tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """Weights as the operations take them: arrays are sent, what is on the device already stays as it is."""
        out = dict(tensors)
        sent = [name for name, values in out.items() if isinstance(values, np.ndarray) and not stays_on_host(name)]
        if sent:
            with DeviceWeights(self) as sink:
                for name in sent:
                    put_array(sink, name, out[name])
            out |= sink.tensors
        return out

    def room_for(self, experts: int, rows: int, depth: int, *, gated: bool) -> PackedWeight:
        """Memory for packed weights; `rows` counts w1's and w3's."""
        outputs = rows // 2 if gated else rows
        memory = self.allocate((packed_elements(outputs, depth, experts, gated),), "bf16")
        return PackedWeight.over(memory, outputs, depth, experts, gated)

    def random_weights(self, shapes: Iterable[tuple[str, tuple[int, ...]]], seed: int = 0) -> dict[str, Any]:
        """Weights of the given names and shapes, as `upload` returns them: normal with deviation 0.02, norms 1, router
        biases 0. Made on the device; shapes that packing pads are made on the host."""
        rng, out = np.random.default_rng(seed), {}
        odd: dict[str, tuple[int, ...]] = {}
        for number, (name, shape) in enumerate(shapes):
            gated, experts = name.endswith("w13"), shape[0] if len(shape) == 3 else 1
            if name.endswith("moe.bias"):
                out[name] = self.zeros(shape, "f32")
                continue
            if name.endswith("norm"):
                out[name] = np.full(shape, 0x3F80, np.uint16)
                continue
            if name.endswith("conv.weight"):
                out[name] = bf16_bits(rng.standard_normal(shape, np.float32) * np.float32(0.02))
                continue
            if name.endswith("moe.gate"):
                memory = out[name] = self.allocate(shape, "bf16")
            elif shape[-1] % BLOCK_K or shape[-2] % UNIT:
                odd[name] = shape
                continue
            else:
                out[name] = self.room_for(experts, *shape[-2:], gated=gated)
                memory = out[name].data
            blocks = 8 * self.device.multiprocessors
            self.launch(_random.random_normal, blocks, _random.THREADS, memory, memory.size // 8, seed, number, 0.02)
        if odd:
            with DeviceWeights(self) as sink:
                for name, shape in odd.items():
                    put_array(sink, name, bf16_bits(rng.standard_normal(shape, np.float32) * np.float32(0.02)))
            out |= sink.tensors
        self.stream.synchronize()
        return out

    def norm_weight(self, bits: NDArray[np.uint16]) -> DeviceArray:
        """A small weight (norm [H]; convolution [H, 3], stored as [3, H])."""
        return self.keep(np.ascontiguousarray(bits.T))

    def allocate_kv(self, pages: int, attention_layers: int, kv_heads: int, *, lazy: bool = False) -> KVCache:
        """Pages for `attention_layers` layers. lazy: addresses only, where the device can; see KVCache.mapper."""
        shape = (pages, attention_layers, 2, kv_heads, PAGE_ROWS * HEAD)
        if not (lazy and self.device.virtual_memory):
            return KVCache(self.zeros(shape, "bf16"))
        reserved = ReservedRange(self.device, math.prod(shape) * 2)
        self._ranges[reserved.pointer] = reserved
        return KVCache(DeviceArray(reserved.pointer, shape, "bf16"), reserved)

    def allocate_ring(self, conv_layers: int, slots: int, hidden: int) -> DeviceArray:
        """Convolution inputs [conv_layers, slots, RING_ROWS, hidden] by position % RING_ROWS."""
        return self.zeros((conv_layers, slots, RING_ROWS, hidden), "bf16")

    def allocate_taps(self, taps: int, conv_layers: int, hidden: int) -> DeviceArray:
        """Convolution states [taps, conv_layers, 2, hidden] for `conv_taps`."""
        return self.zeros((taps, conv_layers, 2, hidden), "bf16")

    def allocate_bytes(self, nbytes: int) -> DeviceArray:
        """Memory for `copy`."""
        return self.allocate((nbytes,), "u8")

    def bytes_of(self, array: DeviceArray) -> DeviceArray:
        """An array's memory, for `copy`."""
        return array.view((array.nbytes,), "u8")

    def zeros(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        array = self.allocate(shape, dtype)
        self.device.fill(array, 0)
        return array

    def penalty_tables(self, slots: int, width: int) -> PenaltyTables:
        """New tables; those made before are given up."""
        if self._tables is not None:
            self.free(self._tables.prompt_seen)
            self.free(self._tables.output_count)
        self._tables = PenaltyTables(self, slots, width)
        return self._tables

    def rope_tables(self, theta: float, max_position: int) -> tuple[DeviceArray, DeviceArray]:
        """cos and sin [max_position, 32], rounded to bf16."""
        cos, sin = _rope.rope_tables(theta, max_position)
        return self.keep(bf16_bits(cos)), self.keep(bf16_bits(sin))

    def copy(self, target: DeviceArray, source: DeviceArray, plan: Sequence[tuple[int, int, int]]) -> None:
        """Queue copies of bytes; plan: (offset in source, offset in target, bytes) of each run, multiples of 16."""
        if plan:
            pieces = _copies.in_pieces(np.array(plan, np.int64))
            owner = self.scratch.take((packed_bytes([pieces]),), "u8")
            [runs] = self._plans.send([pieces], owner.array)
            self.launch(_copies.copy_runs, len(pieces), _copies.COPY_THREADS, source, target, runs)
            del owner


def bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Nearest-even bf16 bits of finite values."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
