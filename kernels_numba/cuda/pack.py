"""Weights in the form that the products read (see products.py), and the kernel that brings them into it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numba import cuda

from .compiler import kernel
from .driver import Device, DeviceArray, Launch
from .products import BLOCK_BYTES, BLOCK_K, UNIT
from .ptx import load_128, store_128

THREADS = 256

u32, i32, u64 = np.uint32, np.int32, np.uint64


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Weights [experts, outputs, depth] as whole units of 16 rows and blocks of 64 k; what pads them is zero.

    A SwiGLU's weights (`gated`) hold w1 and w3, 2 * outputs rows: 8 rows of each to a unit.
    """

    data: DeviceArray
    experts: int
    outputs: int
    """columns of the product: for a SwiGLU its features, not twice that"""
    depth: int
    gated: bool
    units: int = field(init=False)
    """of one expert"""
    expert_bytes: int = field(init=False)
    form: tuple[int, int, int, bool] = field(init=False)
    """experts, outputs, depth, gated: what the choice of a kernel depends on"""

    def __post_init__(self) -> None:
        units = units_of(self.outputs, self.gated)
        object.__setattr__(self, "units", units)
        object.__setattr__(self, "expert_bytes", units * -(-self.depth // BLOCK_K) * BLOCK_BYTES)
        object.__setattr__(self, "form", (self.experts, self.outputs, self.depth, self.gated))

    @property
    def rows(self) -> int:
        """of one expert as it is stored: a SwiGLU's w1 and w3"""
        return 2 * self.outputs if self.gated else self.outputs

    @property
    def padded(self) -> bool:
        """Whether some of the memory is padding."""
        return bool(self.rows % UNIT or self.depth % BLOCK_K)

    @classmethod
    def allocate(
        cls, device: Device, outputs: int, depth: int, *, experts: int = 1, gated: bool = False
    ) -> PackedWeight:
        """Room for weights, to be filled by `pack`."""
        return cls.over(
            device.allocate((packed_elements(outputs, depth, experts, gated),), "bf16"), outputs, depth, experts, gated
        )

    @classmethod
    def over(cls, data: DeviceArray, outputs: int, depth: int, experts: int = 1, gated: bool = False) -> PackedWeight:
        """Weights in memory that is already there (256-byte aligned)."""
        if depth % 16:
            raise ValueError(f"products need a depth that is a multiple of 16, not {depth}")
        if gated and outputs % 8:
            raise ValueError(f"a SwiGLU's features must be a multiple of 8, not {outputs}")
        return cls(data.view((packed_elements(outputs, depth, experts, gated),)), experts, outputs, depth, gated)


def units_of(outputs: int, gated: bool) -> int:
    return outputs // 8 if gated else -(-outputs // UNIT)


def packed_elements(outputs: int, depth: int, experts: int = 1, gated: bool = False) -> int:
    """bf16 values that packed weights take."""
    return experts * units_of(outputs, gated) * -(-depth // BLOCK_K) * UNIT * BLOCK_K


@kernel("u64 u64 i32 i32 i32 i32 i32 i32", threads=THREADS)
def pack_weights(source, target, first, rows, depth, each, blocks_k, gated):
    """Rows `first` ... first + rows - 1 [rows, depth] of weights [experts, each, depth], counted over all experts, into
    their units. gated: an expert's rows are w1's, then as many of w3's. Grid: pieces of 16 bytes, THREADS a block.

    Each row goes where it belongs whatever comes with it, so that weights can be packed as they are read. Padding is
    not written.
    """
    pieces = u32(u32(depth) >> u32(3))
    piece = u32(u32(cuda.blockIdx.x) * u32(THREADS) + u32(cuda.threadIdx.x))
    here = u32(piece // pieces)
    if here >= u32(rows):
        return
    column = u32(piece - u32(here * pieces))
    row = u32(u32(first) + here)
    expert = u32(row // u32(each))
    row = u32(row - u32(expert * u32(each)))
    unit, at = u32(row >> u32(4)), u32(row & u32(15))
    if gated != i32(0):
        half = u32(u32(each) >> u32(1))
        upper = u32(0)
        if row >= half:
            row = u32(row - half)
            upper = u32(8)
        unit, at = u32(row >> u32(3)), u32(u32(row & u32(7)) + upper)
    units = u32(u32(u32(each) + u32(15)) >> u32(4))
    block = u64(u64(u32(u32(expert * units) + unit)) * u64(u32(blocks_k)) + u64(u32(column >> u32(3))))
    place = u32(u32(at * u32(128)) + u32(u32(u32(column & u32(7)) ^ u32(at & u32(7))) * u32(16)))
    a, b, c, d = load_128(u64(source + u64(piece) * u64(16)))
    store_128(u64(target + u64(block * u64(2048)) + u64(place)), a, b, c, d)


def bind_pack(device: Device, weight: PackedWeight, source: DeviceArray, first: int = 0) -> Launch:
    """The launch that packs `source` [..., depth], bf16 as in a checkpoint: rows `first` and on, counted over all
    experts (a SwiGLU's rows are w1's, then w3's, of each). Padding must be zero already: `weight.padded`."""
    each, rows = weight.rows, source.size // weight.depth
    if source.shape[-1] != weight.depth or not 0 <= first <= first + rows <= weight.experts * each:
        raise ValueError(f"weights {source.shape} as rows {first} on of {weight.experts} x {each} x {weight.depth}")
    arguments = [source, weight.data, first, rows, weight.depth, each, -(-weight.depth // BLOCK_K), int(weight.gated)]
    return device.function(pack_weights).bind(-(-rows * (weight.depth // 8) // THREADS), THREADS, arguments)


def pack_on_host(weight: np.ndarray, gated: bool = False) -> np.ndarray:
    """The reference twin of `pack_weights`: bits [rows, depth] as a flat array in the packed form."""
    rows, depth = weight.shape
    order = np.arange(rows)
    if gated:
        order = order.reshape(2, rows // 16, 8).transpose(1, 0, 2).reshape(-1)
    units, blocks = -(-rows // UNIT), -(-depth // BLOCK_K)
    padded = np.zeros((units * UNIT, blocks * BLOCK_K), weight.dtype)
    padded[:rows, :depth] = weight[order]
    pieces = padded.reshape(units, UNIT, blocks, 8, 8).transpose(0, 2, 1, 3, 4)
    swizzled = np.empty_like(pieces)
    for row in range(UNIT):
        for piece in range(8):
            swizzled[:, :, row, piece ^ (row % 8)] = pieces[:, :, row, piece]
    return swizzled.reshape(-1)
