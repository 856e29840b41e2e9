"""Products with many rows on Hopper: wgmma from a ring of shared memory, dense or grouped over experts.

Tiles of 128 rows by COLUMNS outputs. Four producer warps fetch a quarter of a stage each: 32 rows of activations by
cp.async (through a list of row numbers where there is one: no gathered copy is made) and COLUMNS / 4 rows of weights by
bulk copies. Two warpgroups of consumers take 64 rows each; one whose rows are all past the end only keeps step. Blocks
stay and take every gridDim-th tile; with experts the tiles come from the offsets on the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from .compiler import HOPPER, Kernel, kernel
from .functions import pack
from .products import (
    LOGITS,
    RESIDUAL,
    SCALED,
    SWIGLU,
    add_pair,
    find_expert,
    group_table,
    output_address,
    row_weight,
    scale_pair,
    swiglu_pair,
    table_groups,
    table_start,
    with_globals,
)
from .ptx import (
    async_fence,
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_init_fence,
    barrier_wait,
    bulk_copy,
    bulk_prefetch,
    cp_async_16,
    cp_async_arrive,
    dependency_wait,
    dependents_start,
    divide,
    load_128,
    load_fresh,
    shared_address,
    shuffle_xor_32,
    store_128,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait_0,
    wgmma_wait_1,
    zeros,
)
from .scalar import device
from .unroll import registers, static, unrolled

ROWS = 128
THREADS = 384
PANEL = 16
"""Row tiles that share one pass over the weights."""
AHEAD = 4
"""64-k blocks of experts' weights, which come from memory, in one prefetch into the second-level cache."""
A_BYTES = ROWS * 128
HEAD = 2048  # barriers, group table, and what aligns the ring
SHARED = {256: 4, 128: 6, 64: 8}
"""Stages by columns of a tile."""

COLUMNS = STAGES = STAGE_BYTES = AT_ONCE = 0  # of each version, put in by `unrolled`
multiply = zero = epilogue = None  # the same, put in by _make

u32, i32, u64 = np.uint32, np.int32, np.uint64


@device
def transpose_quad(a, b, c, d, lane):
    """Lane q of each four gives four words and gets word q of each of the four, in lane order."""
    odd = (lane & i32(1)) != i32(0)
    p = shuffle_xor_32(a if odd else b, i32(1))
    q = shuffle_xor_32(c if odd else d, i32(1))
    a, b = (p, b) if odd else (a, p)
    c, d = (q, d) if odd else (c, q)
    upper = (lane & i32(2)) != i32(0)
    p = shuffle_xor_32(a if upper else c, i32(2))
    q = shuffle_xor_32(b if upper else d, i32(2))
    a, c = (p, c) if upper else (a, p)
    b, d = (q, d) if upper else (b, q)
    return a, b, c, d


@device
def finish_four(out, out_row, columns, mode, row, last, column, a, b, c, d, weight):
    """Epilogue of 8 outputs of a row at a column that is a multiple of 8, as four bf16 pairs."""
    if row < last and column < columns:
        if mode == SCALED:
            a, b, c, d = scale_pair(a, weight), scale_pair(b, weight), scale_pair(c, weight), scale_pair(d, weight)
        if mode == LOGITS:
            at = output_address(out, out_row, row, column, 4)
            high = u32(0xFFFF0000)
            store_128(at, u32(a << u32(16)), u32(a & high), u32(b << u32(16)), u32(b & high))
            store_128(u64(at + u64(16)), u32(c << u32(16)), u32(c & high), u32(d << u32(16)), u32(d & high))
        else:
            store_128(output_address(out, out_row, row, column, 2), a, b, c, d)


@device
def tile_place(number, tiles_m, tiles_n):
    """Row and column of tile `number` of one group: row tiles first, in panels, so that weights are shared."""
    panel = i32(divide(u32(number), u32(tiles_n * i32(PANEL))))
    rest = i32(number - i32(panel * i32(tiles_n * i32(PANEL))))
    height = min(i32(PANEL), i32(tiles_m - i32(panel * i32(PANEL))))
    column = i32(divide(u32(rest), u32(height)))
    return i32(i32(panel * i32(PANEL)) + i32(rest - i32(column * height))), column


def _epilogue(acc, out, out_row, columns, mode, extra, row, last, unit, lane, weight_0, weight_8):
    """Stores a warp's part of a tile: acc is 16 rows by COLUMNS outputs, `unit` its first unit of weights. weight_0,
    weight_8: of this lane's two rows."""
    quarter = i32(lane & i32(3))
    for h in static(2):
        at = i32(row + i32(h * 8))
        weight = weight_0
        if h == 1:
            weight = weight_8
        if mode == SWIGLU:
            for g in static(COLUMNS // 64):
                w = registers(4, u32(0))
                for i in static(4):
                    gate = pack(acc[4 * (8 * g + 2 * i) + 2 * h], acc[4 * (8 * g + 2 * i) + 2 * h + 1])
                    up = pack(acc[4 * (8 * g + 2 * i + 1) + 2 * h], acc[4 * (8 * g + 2 * i + 1) + 2 * h + 1])
                    w[i] = swiglu_pair(gate, up)
                a, b, c, d = transpose_quad(w[0], w[1], w[2], w[3], lane)
                column = i32(i32(unit + i32(4 * g) + quarter) * i32(8))
                finish_four(out, out_row, columns, mode, at, last, column, a, b, c, d, weight)
        elif mode == RESIDUAL:  # asked for AT_ONCE together: one latency, not one for each
            words = registers(COLUMNS // 8)
            for i in static(COLUMNS // 8):
                words[i] = pack(acc[4 * i + 2 * h], acc[4 * i + 2 * h + 1])
            for first in static(0, COLUMNS // 32, AT_ONCE):
                rest = registers(4 * AT_ONCE, u32(0))
                if at < last:
                    for j in static(AT_ONCE):
                        column = i32(i32(unit * i32(16)) + i32(i32(i32(4 * (first + j)) + quarter) * i32(8)))
                        if column < columns:
                            r = registers(4)
                            r = load_128(output_address(extra, out_row, at, column, 2))
                            for i in static(4):
                                rest[4 * j + i] = r[i]
                for j in static(AT_ONCE):
                    n = registers(4)
                    for i in static(4):
                        n[i] = words[4 * (first + j) + i]
                    a, b, c, d = transpose_quad(n[0], n[1], n[2], n[3], lane)
                    a, b = add_pair(a, rest[4 * j]), add_pair(b, rest[4 * j + 1])
                    c, d = add_pair(c, rest[4 * j + 2]), add_pair(d, rest[4 * j + 3])
                    column = i32(i32(unit * i32(16)) + i32(i32(i32(4 * (first + j)) + quarter) * i32(8)))
                    if at < last and column < columns:
                        store_128(output_address(out, out_row, at, column, 2), a, b, c, d)
        else:
            for g in static(COLUMNS // 32):
                w = registers(4, u32(0))
                for i in static(4):
                    w[i] = pack(acc[4 * (4 * g + i) + 2 * h], acc[4 * (4 * g + i) + 2 * h + 1])
                a, b, c, d = transpose_quad(w[0], w[1], w[2], w[3], lane)
                column = i32(i32(unit * i32(16)) + i32(i32(i32(4 * g) + quarter) * i32(8)))
                finish_four(out, out_row, columns, mode, at, last, column, a, b, c, d, weight)


def _gemm(
    x, x_row, rows, depth, w, expert_bytes, units, out, out_row, columns, mode, extra, start, experts, gather
):  # fmt: skip
    base = u32(u32(shared_address(cuda.shared.array(0, np.uint8)) + u32(1023)) & u32(0xFFFFFC00))
    tid = i32(cuda.threadIdx.x)
    lane = i32(tid & i32(31))
    warp = i32(tid >> i32(5))
    table = u32(base + u32(128))
    ring = u32(base + u32(HEAD))
    if tid == i32(0):
        for s in range(STAGES):
            barrier_init(
                u32(base + u32(s) * u32(16)), u32(4 + 128)
            )  # each producer's weights, each of its threads' rows
            barrier_init(u32(base + u32(s) * u32(16) + u32(8)), u32(8))
        barrier_init_fence()
        async_fence()
    dependency_wait()
    dependents_start()
    tiles_n = i32(i32(units + i32(COLUMNS // 16 - 1)) // i32(COLUMNS // 16))
    tiles_m = i32(i32(rows + i32(127)) >> i32(7))
    if start != u64(0):
        if warp == i32(0):
            group_table(start, experts, i32(7), table, lane)
        cuda.syncthreads()
        tiles_m = table_groups(table, experts)
    else:
        cuda.syncthreads()
    total = i32(tiles_m * tiles_n)
    blocks_k = i32(depth >> i32(6))
    unit_bytes = i32(blocks_k * i32(2048))
    number = i32(cuda.blockIdx.x)
    slot = i32(0)
    if warp < i32(8):
        parity = u32(0)
        layout = u64(u64(u64(1) << u64(62)) | u64(u64(64) << u64(32)) | u64(u64(1) << u64(16)))
        group = i32(warp >> i32(2))
        while number < total:
            # where the tile lies
            expert = i32(0)
            local = number
            height = tiles_m
            first = i32(0)
            last = rows
            if start != u64(0):
                expert = find_expert(table, experts, number, tiles_n)
                before = table_groups(table, expert)
                local = i32(number - i32(before * tiles_n))
                height = i32(table_groups(table, i32(expert + i32(1))) - before)
                first = table_start(table, expert)
                last = table_start(table, i32(expert + i32(1)))
            tile_m, tile_n = tile_place(local, height, tiles_n)
            row = i32(first + i32(tile_m * i32(ROWS)) + i32(group * i32(64)))
            if row >= last:  # this half of the tile is empty: only keep step
                for _ in range(blocks_k):
                    barrier_wait(u32(base + u32(slot) * u32(16)), parity)
                    if lane == i32(0):
                        barrier_arrive(u32(base + u32(slot) * u32(16) + u32(8)))
                    slot = i32(slot + i32(1))
                    if slot == i32(STAGES):
                        slot = i32(0)
                        parity = u32(parity ^ u32(1))
                number = i32(number + i32(cuda.gridDim.x))
                continue
            acc = zero()
            freed = u32(0)
            for k in range(blocks_k):
                barrier_wait(u32(base + u32(slot) * u32(16)), parity)
                async_fence()  # wgmma reads what cp.async wrote
                stage = u32(ring + u32(slot) * u32(STAGE_BYTES))
                a = u64(layout | u64(u32(u32(stage + u32(group) * u32(8192)) >> u32(4))))
                b = u64(layout | u64(u32(u32(stage + u32(A_BYTES)) >> u32(4))))
                wgmma_fence()
                acc = multiply(acc, a, b)
                acc = multiply(acc, u64(a + u64(2)), u64(b + u64(2)))
                acc = multiply(acc, u64(a + u64(4)), u64(b + u64(4)))
                acc = multiply(acc, u64(a + u64(6)), u64(b + u64(6)))
                wgmma_commit()
                wgmma_wait_1()
                if k > 0 and lane == i32(0):
                    barrier_arrive(freed)
                freed = u32(base + u32(slot) * u32(16) + u32(8))
                slot = i32(slot + i32(1))
                if slot == i32(STAGES):
                    slot = i32(0)
                    parity = u32(parity ^ u32(1))
            row = i32(row + i32(i32(warp & i32(3)) * i32(16)) + i32(lane >> i32(2)))
            weight_0, weight_8 = np.float32(0.0), np.float32(0.0)
            if mode == SCALED:  # while the last products run
                weight_0 = row_weight(extra, min(row, i32(last - i32(1))))
                weight_8 = row_weight(extra, min(i32(row + i32(8)), i32(last - i32(1))))
            wgmma_wait_0()
            if lane == i32(0):
                barrier_arrive(freed)
            unit = i32(tile_n * i32(COLUMNS // 16))
            epilogue(acc, out, out_row, columns, mode, extra, row, last, unit, lane, weight_0, weight_8)
            number = i32(number + i32(cuda.gridDim.x))
    else:
        parity = u32(1)
        share = i32(i32(warp - i32(8)) * i32(32))
        row_in_eight = i32(lane >> i32(3))
        piece = i32(lane & i32(7))
        # rows 4 i + row_in_eight of this warp's: even and odd i differ in the swizzle only
        even = u32(u32(share + row_in_eight) * u32(128) + u32(i32(piece ^ row_in_eight)) * u32(16))
        odd = u32(
            u32(share + row_in_eight) * u32(128) + u32(i32(piece ^ i32(row_in_eight + i32(4)))) * u32(16) + u32(512)
        )
        while number < total:
            expert = i32(0)
            local = number
            height = tiles_m
            first = i32(0)
            last = rows
            if start != u64(0):
                expert = find_expert(table, experts, number, tiles_n)
                before = table_groups(table, expert)
                local = i32(number - i32(before * tiles_n))
                height = i32(table_groups(table, i32(expert + i32(1))) - before)
                first = table_start(table, expert)
                last = table_start(table, i32(expert + i32(1)))
            tile_m, tile_n = tile_place(local, height, tiles_n)
            there = i32(last - first - i32(tile_m * i32(ROWS)) - share)  # rows of this warp's that exist
            offset = registers(8, u32(0))  # of the rows, in units of 16 bytes
            for i in static(8):  # rows past the end repeat the last one
                row = i32(first + i32(tile_m * i32(ROWS)) + share + row_in_eight + i32(4 * i))
                row = min(row, i32(last - i32(1)))
                if gather != u64(0):
                    row = load_fresh(u64(gather + u64(row) * u64(4)))
                offset[i] = u32(u64(u64(row) * u64(x_row)) >> u64(4))
            unit = i32(i32(tile_n * i32(COLUMNS // 16)) + i32(i32(warp - i32(8)) * i32(COLUMNS // 64)))
            taken = max(i32(0), min(i32(COLUMNS // 64), i32(units - unit)))
            source = u64(w + u64(expert) * u64(expert_bytes) + u64(i32(unit + lane)) * u64(unit_bytes))
            place = u32(u32(A_BYTES) + u32(i32(i32(warp - i32(8)) * i32(COLUMNS // 64)) + lane) * u32(2048))
            x_piece = u64(x + u64(piece * i32(16)))
            for k in range(blocks_k):
                full = u32(base + u32(slot) * u32(16))
                barrier_wait(u32(full + u32(8)), parity)
                stage = u32(ring + u32(slot) * u32(STAGE_BYTES))
                if lane == i32(0):
                    barrier_expect(full, u32(u32(taken) * u32(2048)))
                cuda.syncwarp()
                if lane < taken:
                    bulk_copy(u32(stage + place), source, u32(2048), full)
                    if start != u64(0) and i32(k & i32(3)) == i32(0) and i32(k + i32(2 * AHEAD)) <= blocks_k:
                        bulk_prefetch(u64(source + u64(AHEAD * 2048)), u32(AHEAD * 2048))
                source = u64(source + u64(2048))
                if there >= i32(32):
                    for i in static(8):
                        address = u64(x_piece + u64(u64(offset[i]) << u64(4)))
                        if i % 2 == 0:
                            cp_async_16(u32(stage + even + u32(512 * i)), address)
                        else:
                            cp_async_16(u32(stage + odd + u32(512 * (i - 1))), address)
                else:  # what lies in the place of rows past the end only meets results that are not stored
                    for i in static(8):
                        if i32(4 * i) < there:
                            address = u64(x_piece + u64(u64(offset[i]) << u64(4)))
                            if i % 2 == 0:
                                cp_async_16(u32(stage + even + u32(512 * i)), address)
                            else:
                                cp_async_16(u32(stage + odd + u32(512 * (i - 1))), address)
                x_piece = u64(x_piece + u64(128))
                cp_async_arrive(full)
                slot = i32(slot + i32(1))
                if slot == i32(STAGES):
                    slot = i32(0)
                    parity = u32(parity ^ u32(1))
            number = i32(number + i32(cuda.gridDim.x))


ARGUMENTS = "u64 i32 i32 i32 u64 i64 i32 u64 i32 i32 i32 u64 u64 i32 u64"


def stage_bytes(columns: int) -> int:
    return A_BYTES + columns * 128


def shared_bytes(columns: int) -> int:
    return 1024 + HEAD + SHARED[columns] * stage_bytes(columns)


def _make(columns: int) -> Kernel:
    known: dict[str, Any] = {
        "COLUMNS": columns, "STAGES": SHARED[columns], "STAGE_BYTES": stage_bytes(columns), "ROWS": ROWS,
        "A_BYTES": A_BYTES, "AHEAD": AHEAD,
    }  # fmt: skip
    function = with_globals(
        unrolled(_gemm, **known),
        multiply=wgmma(columns),
        zero=zeros(columns // 2),
        epilogue=device(unrolled(_epilogue, COLUMNS=columns, AT_ONCE=min(columns // 32, 4))),
    )
    register = kernel(
        ARGUMENTS,
        threads=THREADS,
        dynamic_shared=shared_bytes(columns),
        architectures=HOPPER,
        name=f"wgmma_product_{columns}",
    )
    return register(function)


WGMMA_PRODUCTS = {columns: _make(columns) for columns in SHARED}
"""By the columns of a tile."""
