"""Products by mma.sync and cp.async: every GPU from compute capability 8.0, any number of rows, dense or grouped.

Tiles of ROWS by COLUMNS outputs, 64 k a stage, several stages filled ahead of the one in use. A warp owns some rows and
some units of the tile and adds in ascending k. Where there is nothing faster for a GPU or a shape, this runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from .compiler import Kernel, kernel
from .functions import pack
from .gemm_wgmma import tile_place
from .products import find_expert, finish_unit, group_table, table_groups, table_start, with_globals
from .ptx import (
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    dependency_wait,
    dependents_start,
    ldmatrix_x4,
    load_fresh,
    mma,
    shared_address,
)
from .unroll import registers, static, unrolled

HEAD = 1152  # group table and what aligns the stages to 128 bytes
SHAPES = {(16, 64): (1, 4, 8), (64, 64): (2, 4, 5), (128, 128): (2, 4, 3)}
"""Warps down, warps across and stages, by rows and columns of a tile; all within the 99 KiB that every GPU has."""

ROWS = COLUMNS = WARPS_M = WARPS_N = MT = UT = SHIFT = STAGE_BYTES = LOADS_X = LOADS_W = STAGES = (
    0  # of each version, put in by `unrolled`
)
landed = None  # the same, put in by _make

u32, i32, u64 = np.uint32, np.int32, np.uint64


def _gemm(x, x_row, rows, depth, w, expert_bytes, units, out, out_row, columns, mode, extra, start, experts, gather):
    base = u32(u32(shared_address(cuda.shared.array(0, np.uint8)) + u32(127)) & u32(0xFFFFFF80))
    tid = i32(cuda.threadIdx.x)
    lane = i32(tid & i32(31))
    warp = i32(tid >> i32(5))
    warp_m = i32(warp // i32(WARPS_N))
    warp_n = i32(warp - i32(warp_m * i32(WARPS_N)))
    ring = u32(base + u32(HEAD))
    dependency_wait()
    dependents_start()
    tiles_n = i32(i32(units + i32(COLUMNS // 16 - 1)) // i32(COLUMNS // 16))
    tiles_m = i32(i32(rows + i32(ROWS - 1)) >> i32(SHIFT))
    if start != u64(0):
        if warp == i32(0):
            group_table(start, experts, i32(SHIFT), base, lane)
        cuda.syncthreads()
        tiles_m = table_groups(base, experts)
    total = i32(tiles_m * tiles_n)
    blocks_k = i32(i32(depth + i32(63)) >> i32(6))
    unit_bytes = i32(blocks_k * i32(2048))
    xo = u32(u32(i32(warp_m * i32(16 * MT)) + i32(lane & i32(15))) * u32(128))
    xo = u32(xo + u32(u32(lane >> i32(4)) ^ u32(lane & i32(7))) * u32(16))
    wo = u32(u32(ROWS * 128) + u32(i32(warp_n * i32(UT))) * u32(2048) + u32(lane >> i32(4)) * u32(1024))
    wo = u32(wo + u32(lane & i32(7)) * u32(128) + u32(u32(u32(lane >> i32(3)) & u32(1)) ^ u32(lane & i32(7))) * u32(16))
    piece = i32(tid & i32(7))
    x_to = u32(u32(tid >> i32(3)) * u32(128) + u32(i32(piece ^ i32(i32(tid >> i32(3)) & i32(7)))) * u32(16))
    number = i32(cuda.blockIdx.x)
    while number < total:
        expert = i32(0)
        local = number
        height = tiles_m
        first = i32(0)
        last = rows
        if start != u64(0):
            expert = find_expert(base, experts, number, tiles_n)
            before = table_groups(base, expert)
            local = i32(number - i32(before * tiles_n))
            height = i32(table_groups(base, i32(expert + i32(1))) - before)
            first = table_start(base, expert)
            last = table_start(base, i32(expert + i32(1)))
        tile_m, tile_n = tile_place(local, height, tiles_n)
        first = i32(first + i32(tile_m * i32(ROWS)))
        unit = i32(tile_n * i32(COLUMNS // 16))
        x_from = registers(LOADS_X, u64(0))
        x_ok = registers(LOADS_X, False)
        for i in static(LOADS_X):
            place = i32(i32(tid >> i32(3)) + i32(i * 4 * WARPS_M * WARPS_N))
            row = i32(first + place)
            if place < i32(ROWS) and row < last:
                if gather != u64(0):
                    row = load_fresh(u64(gather + u64(row) * u64(4)))
                x_from[i] = u64(x + u64(row) * u64(x_row) + u64(piece) * u64(16))
                x_ok[i] = True
        w_from = registers(LOADS_W, u64(0))
        w_ok = registers(LOADS_W, False)
        for i in static(LOADS_W):
            place = i32(tid + i32(i * 32 * WARPS_M * WARPS_N))
            mine = i32(unit + i32(place >> i32(7)))
            if place < i32(COLUMNS * 8) and mine < units:
                w_from[i] = u64(w + u64(expert) * u64(expert_bytes) + u64(mine) * u64(unit_bytes))
                w_from[i] = u64(w_from[i] + u64(i32(place & i32(127))) * u64(16))
                w_ok[i] = True
        for s in range(STAGES - 1):
            if s < blocks_k:
                inside = i32(i32(s * i32(64)) + i32(piece * i32(8))) < depth
                into = u32(ring + u32(s) * u32(STAGE_BYTES))
                for i in static(LOADS_X):
                    if x_ok[i] and inside:
                        at = u32(into + x_to + u32(i * 512 * WARPS_M * WARPS_N))
                        cp_async_16(at, u64(x_from[i] + u64(u32(s)) * u64(128)))
                for i in static(LOADS_W):
                    if w_ok[i]:
                        at = u32(into + u32(ROWS * 128) + u32(tid) * u32(16) + u32(i * 512 * WARPS_M * WARPS_N))
                        cp_async_16(at, u64(w_from[i] + u64(u32(s)) * u64(2048)))
            cp_async_commit()
        acc = registers(8 * MT * UT, np.float32(0.0))
        slot = i32(0)
        fill = i32(STAGES - 1)
        for k in range(blocks_k):
            landed()
            cuda.syncthreads()
            ahead = i32(k + i32(STAGES - 1))
            if ahead < blocks_k:
                inside = i32(i32(ahead * i32(64)) + i32(piece * i32(8))) < depth
                into = u32(ring + u32(fill) * u32(STAGE_BYTES))
                for i in static(LOADS_X):
                    if x_ok[i] and inside:
                        at = u32(into + x_to + u32(i * 512 * WARPS_M * WARPS_N))
                        cp_async_16(at, u64(x_from[i] + u64(u32(ahead)) * u64(128)))
                for i in static(LOADS_W):
                    if w_ok[i]:
                        at = u32(into + u32(ROWS * 128) + u32(tid) * u32(16) + u32(i * 512 * WARPS_M * WARPS_N))
                        cp_async_16(at, u64(w_from[i] + u64(u32(ahead)) * u64(2048)))
            cp_async_commit()
            fill = i32(fill + i32(1))
            if fill == i32(STAGES):
                fill = i32(0)
            stage = u32(ring + u32(slot) * u32(STAGE_BYTES))
            xa = u32(stage + xo)
            wa = u32(stage + wo)
            steps = min(i32(4), i32(i32(depth - i32(k * i32(64))) >> i32(4)))
            for s in static(4):
                if i32(s) < steps:
                    b = registers(4 * UT, u32(0))
                    for n in static(UT):
                        r = ldmatrix_x4(u32(u32(wa ^ u32(s * 32)) + u32(n * 2048)))
                        b[4 * n] = r[0]
                        b[4 * n + 1] = r[1]
                        b[4 * n + 2] = r[2]
                        b[4 * n + 3] = r[3]
                    for m in static(MT):
                        a = ldmatrix_x4(u32(u32(xa ^ u32(s * 32)) + u32(m * 2048)))
                        for n in static(UT):
                            for t in static(2):
                                d = mma(
                                    a[0], a[1], a[2], a[3], b[4 * n + 2 * t], b[4 * n + 2 * t + 1],
                                    acc[8 * (m * UT + n) + 4 * t], acc[8 * (m * UT + n) + 4 * t + 1],
                                    acc[8 * (m * UT + n) + 4 * t + 2], acc[8 * (m * UT + n) + 4 * t + 3],
                                )  # fmt: skip
                                acc[8 * (m * UT + n) + 4 * t] = d[0]
                                acc[8 * (m * UT + n) + 4 * t + 1] = d[1]
                                acc[8 * (m * UT + n) + 4 * t + 2] = d[2]
                                acc[8 * (m * UT + n) + 4 * t + 3] = d[3]
            slot = i32(slot + i32(1))
            if slot == i32(STAGES):
                slot = i32(0)
        cuda.syncthreads()  # the next tile fills the stages from the first on
        for m in static(MT):
            for h in static(2):
                row = i32(first + i32(warp_m * i32(16 * MT)) + i32(m * 16 + h * 8) + i32(lane >> i32(2)))
                if row < last:
                    for n in static(UT):
                        mine = i32(unit + i32(warp_n * i32(UT)) + i32(n))
                        if mine < units:
                            low = pack(acc[8 * (m * UT + n) + 2 * h], acc[8 * (m * UT + n) + 2 * h + 1])
                            high = pack(acc[8 * (m * UT + n) + 4 + 2 * h], acc[8 * (m * UT + n) + 4 + 2 * h + 1])
                            finish_unit(out, out_row, columns, mode, extra, row, mine, low, high, lane)
        number = i32(number + i32(cuda.gridDim.x))


ARGUMENTS = "u64 i32 i32 i32 u64 i64 i32 u64 i32 i32 i32 u64 u64 i32 u64"


def shared_bytes(rows: int, columns: int) -> int:
    return 128 + HEAD + SHAPES[rows, columns][2] * (rows + columns) * 128


def _make(rows: int, columns: int) -> Kernel:
    down, across, stages = SHAPES[rows, columns]
    threads = 32 * down * across
    known: dict[str, Any] = {
        "ROWS": rows, "COLUMNS": columns, "WARPS_M": down, "WARPS_N": across, "SHIFT": rows.bit_length() - 1,
        "MT": rows // 16 // down, "UT": columns // 16 // across, "STAGE_BYTES": (rows + columns) * 128,
        "LOADS_X": -(-rows * 8 // threads), "LOADS_W": -(-columns * 8 // threads), "STAGES": stages, "HEAD": HEAD,
    }  # fmt: skip
    function = with_globals(unrolled(_gemm, **known), landed=cp_async_wait(stages - 2))
    name = f"mma_product_{rows}x{columns}"
    return kernel(ARGUMENTS, threads=threads, dynamic_shared=shared_bytes(rows, columns), name=name)(function)


MMA_PRODUCTS = {shape: _make(*shape) for shape in SHAPES}
"""By rows and columns of a tile."""
