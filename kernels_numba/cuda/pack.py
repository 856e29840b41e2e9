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


@kernel("u64 u64 i32 i32 i32 i32", threads=THREADS)
def pack_weights(source, target, rows, depth, blocks_k, gated):
    """Rows [experts, rows, depth] into units; grid (units, experts). gated: rows are w1's, then as many of w3's."""
    unit = i32(cuda.blockIdx.x)
    size = u64(u64(u32(cuda.gridDim.x)) * u64(u32(blocks_k)) * u64(2048))
    source = u64(source + u64(u32(cuda.blockIdx.y)) * u64(u32(rows)) * u64(u32(depth)) * u64(2))
    target = u64(target + u64(u32(cuda.blockIdx.y)) * size + u64(u32(unit)) * u64(u32(blocks_k)) * u64(2048))
    for piece in range(i32(cuda.threadIdx.x), i32(blocks_k * i32(128)), THREADS):
        piece = i32(piece)
        # consecutive threads read consecutive pieces of a row
        at = i32(piece // i32(blocks_k * i32(8)))
        column = i32(piece - i32(at * i32(blocks_k * i32(8))))
        row = i32(i32(unit * i32(16)) + at)
        if gated != i32(0):
            row = i32(i32(unit * i32(8)) + i32(at & i32(7)))
            if at >= i32(8):
                row = i32(row + i32(rows >> i32(1)))
        a, b, c, d = u32(0), u32(0), u32(0), u32(0)
        if row < rows and i32(column * i32(8)) < depth:
            a, b, c, d = load_128(
                u64(source + u64(u64(u32(row)) * u64(u32(depth)) + u64(u32(column)) * u64(8)) * u64(2))
            )
        to = i32(i32(i32(column >> i32(3)) * i32(2048)) + i32(at * i32(128)))
        to = i32(to + i32(i32(i32(column & i32(7)) ^ i32(at & i32(7))) * i32(16)))
        store_128(u64(target + u64(u32(to))), a, b, c, d)


def bind_pack(device: Device, weight: PackedWeight, source: DeviceArray, first_expert: int = 0) -> Launch:
    """The launch that packs `source` [experts, rows, depth] or [rows, depth], bf16 as in a checkpoint (a SwiGLU's rows
    are w1's, then w3's), as experts `first_expert` and on."""
    experts = source.shape[0] if len(source.shape) == 3 else 1
    rows = weight.outputs * 2 if weight.gated else weight.outputs
    if source.shape[-2:] != (rows, weight.depth) or not 0 <= first_expert <= weight.experts - experts:
        raise ValueError(
            f"weights {source.shape} for experts {first_expert} on of {weight.experts} x {rows} x {weight.depth}"
        )
    blocks_k = -(-weight.depth // BLOCK_K)
    target = weight.data.pointer + first_expert * weight.expert_bytes
    return device.function(pack_weights).bind(
        (weight.units, experts), THREADS, [source, target, rows, weight.depth, blocks_k, int(weight.gated)]
    )


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
