"""Products with few rows, at the speed of memory (sm_90 and newer).

One block a multiprocessor, three roles. The weight warp streams the block's units of weights through a ring of shared
memory by bulk copies; it needs nothing of the kernel before and so begins early. The row warps bring the same k of the
activations by cp.async. A consumer warp owns some rows of one unit (16 outputs a row) of a round and adds in ascending
k, with the next fragments on their way. With experts, a group is up to ROWS rows of one, and a round is of one group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from .compiler import BULK, Kernel, kernel
from .functions import pack
from .products import (
    RESIDUAL,
    SCALED,
    SWIGLU,
    TABLE_BYTES,
    add_pair,
    find_expert,
    group_table,
    residual_pair,
    row_weight,
    scale_pair,
    store_pair,
    swiglu_pair,
    table_groups,
    table_start,
)
from .ptx import (
    async_fence,
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_init_fence,
    barrier_wait,
    bulk_copy_hinted,
    cp_async_16,
    cp_async_arrive,
    dependency_wait,
    dependents_start,
    divide,
    evict_first,
    ldmatrix_x2,
    ldmatrix_x4,
    load_fresh,
    mma,
    shared_address,
)
from .scalar import device, shuffle_xor
from .unroll import registers, static, unrolled

STAGES = 32
"""Most stages of the ring."""
CHUNK = 128
"""k of a stage."""
UNIT_CHUNK = 16 * CHUNK * 2
X_PITCH = CHUNK * 2 + 16  # shared memory from row to row of activations; 16 more, so that ldmatrix meets no bank twice
RING = 512 + TABLE_BYTES + 496  # barriers, group table, then the stages
BUDGET = 112 << 10
"""Shared memory of a block: two kernels fit a multiprocessor, so the next one's weights can already come in."""
SHAPES = {8: (8, 1, 1), 16: (8, 1, 1), 32: (8, 2, 2), 64: (4, 4, 4)}
"""By the most rows of a group: units of a round at most, consumer warps that share the rows of a unit, row warps."""

ROWS = SHIFT = MT = HALVES = SPLIT = X_WARPS = X_COPIES = 0  # of each version, put in by `unrolled`

u32, i32, u64 = np.uint32, np.int32, np.uint64


def stage_bytes(rows: int, warps: int) -> int:
    return warps * UNIT_CHUNK + rows * X_PITCH


@device
def advance(slot, parity, stages):
    """The next slot of the ring and the parity of its phase."""
    slot = i32(slot + i32(1))
    if slot == stages:
        return i32(0), u32(parity ^ u32(1))
    return slot, parity


def _ring(
    x, x_row, rows, depth, w, expert_bytes, units, out, out_row, columns, mode, extra, start, experts, gather, warps,
    stages, early,
):  # fmt: skip
    base = u32(u32(shared_address(cuda.shared.array(0, np.uint8)) + u32(127)) & u32(0xFFFFFF80))
    tid = i32(cuda.threadIdx.x)
    lane = i32(tid & i32(31))
    warp = i32(tid >> i32(5))
    consumers = i32(warps * i32(SPLIT))
    table = u32(base + u32(512))
    ring = u32(base + u32(RING))
    stage_size = u32(u32(warps) * u32(UNIT_CHUNK) + u32(ROWS * X_PITCH))
    if tid == i32(0):
        for s in range(stages):
            barrier_init(u32(base + u32(s) * u32(16)), u32(1 + 32 * X_WARPS))
            barrier_init(u32(base + u32(s) * u32(16) + u32(8)), u32(consumers))
        barrier_init_fence()
        async_fence()
    if early == i32(0):  # the group table, and so the weights' addresses, come from the kernel before
        dependency_wait()
    dependents_start()
    groups = i32(i32(rows + i32(ROWS - 1)) >> i32(SHIFT))
    if start != u64(0):
        if warp == i32(0):
            group_table(start, experts, i32(SHIFT), table, lane)
        cuda.syncthreads()
        groups = table_groups(table, experts)
    else:
        cuda.syncthreads()
    total = u32(u32(groups) * u32(units))
    grid = u32(cuda.gridDim.x)
    unit = i32(divide(u32(total * u32(cuda.blockIdx.x)), grid))
    stop = i32(divide(u32(total * u32(u32(cuda.blockIdx.x) + u32(1))), grid))
    if start != u64(0) and groups > i32(0) and u32(u32(groups) * u32(8)) <= grid:
        # few groups: whole blocks for each, so that no block has a second, short round
        group = i32(divide(u32(u32(cuda.blockIdx.x) * u32(groups)), grid))
        begin = i32(divide(u32(u32(group) * grid + u32(groups) - u32(1)), u32(groups)))
        count = i32(i32(divide(u32(u32(group + i32(1)) * grid + u32(groups) - u32(1)), u32(groups))) - begin)
        at = u32(i32(i32(cuda.blockIdx.x) - begin))
        unit = i32(i32(group * units) + i32(divide(u32(u32(units) * at), u32(count))))
        stop = i32(i32(group * units) + i32(divide(u32(u32(units) * u32(at + u32(1))), u32(count))))
    chunks = i32(i32(depth + i32(CHUNK - 1)) // i32(CHUNK))
    unit_bytes = i32(i32(i32(depth + i32(63)) // i32(64)) * i32(2048))
    slot = i32(0)
    parity = u32(0)
    if warp > consumers:  # the producers find the ring empty at first
        parity = u32(1)
    if warp == consumers:
        parity = u32(1)
        policy = evict_first()
        while unit < stop:
            group = i32(divide(u32(unit), u32(units)))
            tile = i32(unit - i32(group * units))
            taken = min(warps, i32(stop - unit), i32(units - tile))
            expert = i32(0)
            if start != u64(0):
                expert = find_expert(table, experts, group, i32(1))
            source = u64(w + u64(expert) * u64(expert_bytes) + u64(i32(tile + lane)) * u64(unit_bytes))
            for c in range(chunks):
                part = min(i32(UNIT_CHUNK), i32(unit_bytes - i32(c * UNIT_CHUNK)))
                full = u32(base + u32(slot) * u32(16))
                barrier_wait(u32(full + u32(8)), parity)
                if lane == i32(0):
                    barrier_expect(full, u32(taken * part))
                cuda.syncwarp()
                if lane < taken:
                    at = u32(ring + u32(slot) * stage_size + u32(lane) * u32(UNIT_CHUNK))
                    bulk_copy_hinted(at, source, u32(part), full, policy)
                source = u64(source + u64(UNIT_CHUNK))
                slot, parity = advance(slot, parity, stages)
            unit = i32(unit + taken)
        return
    dependency_wait()
    if warp > consumers:
        # row 2 i + (lane / 16) of this warp's share, 16-byte piece lane % 16 of a chunk
        mine = i32(i32(warp - consumers - i32(1)) * i32(2 * X_COPIES) + i32(lane >> i32(4)))
        piece = i32(lane & i32(15))
        to = u32(u32(warps) * u32(UNIT_CHUNK) + u32(mine) * u32(X_PITCH) + u32(piece) * u32(16))
        while unit < stop:
            group = i32(divide(u32(unit), u32(units)))
            tile = i32(unit - i32(group * units))
            taken = min(warps, i32(stop - unit), i32(units - tile))
            first = i32(group * i32(ROWS))
            last = rows
            if start != u64(0):
                expert = find_expert(table, experts, group, i32(1))
                first = i32(table_start(table, expert) + i32(i32(group - table_groups(table, expert)) * i32(ROWS)))
                last = table_start(table, i32(expert + i32(1)))
            source = registers(X_COPIES, u64(0))
            for i in static(X_COPIES):
                row = i32(first + mine + i32(2 * i))
                if row < last:
                    if gather != u64(0):
                        row = load_fresh(u64(gather + u64(row) * u64(4)))
                    source[i] = u64(x + u64(row) * u64(x_row) + u64(i32(piece * i32(16))))
            for c in range(chunks):
                full = u32(base + u32(slot) * u32(16))
                barrier_wait(u32(full + u32(8)), parity)
                if i32(i32(c * CHUNK) + i32(piece * i32(8))) < depth:
                    at = u32(ring + u32(slot) * stage_size + to)
                    for i in static(X_COPIES):
                        if source[i] != u64(0):
                            cp_async_16(u32(at + u32(2 * i * X_PITCH)), u64(source[i] + u64(c * CHUNK * 2)))
                cp_async_arrive(full)
                slot, parity = advance(slot, parity, stages)
            unit = i32(unit + taken)
        return
    if ROWS == 8:
        # weights are the 16-row operand: row l % 16, 16-byte piece l / 16 of the k step; swizzled by the row
        wo = u32(u32(lane & i32(15)) * u32(128) + u32(u32(lane >> i32(4)) ^ u32(lane & i32(7))) * u32(16))
        # activations are the 8-row one: row l % 8, piece l / 8 of two k steps
        xo = u32(u32(lane & i32(7)) * u32(X_PITCH) + u32(lane >> i32(3)) * u32(16))
        here = i32(i32(i32(lane & i32(3)) * i32(2)) + i32(i32(lane >> i32(2)) & i32(1)))
        pair = i32(i32(lane >> i32(3)) * i32(2))
    else:
        # weights are the 8-row operand, twice: row l % 8 of half l / 16, piece (l / 8) % 2
        # activations are the 16-row one: row l % 16, piece l / 16
        wo = u32(u32(lane >> i32(4)) * u32(1024) + u32(lane & i32(7)) * u32(128))
        wo = u32(wo + u32(u32(u32(lane >> i32(3)) & u32(1)) ^ u32(lane & i32(7))) * u32(16))
        xo = u32(u32(lane & i32(15)) * u32(X_PITCH) + u32(lane >> i32(4)) * u32(16))
        here = i32(lane >> i32(2))
        pair = i32(i32(lane & i32(3)) * i32(2))
    wo = u32(wo + u32(warp // i32(SPLIT)) * u32(UNIT_CHUNK))
    share = i32(i32(warp - i32(i32(warp // i32(SPLIT)) * i32(SPLIT))) * i32(16 * MT))  # this warp's first row
    here = i32(here + share)
    xo = u32(xo + u32(warps) * u32(UNIT_CHUNK) + u32(share) * u32(X_PITCH))
    whole = i32(depth // i32(CHUNK))
    rest = i32(i32(depth - i32(whole * i32(CHUNK))) >> i32(4))
    while unit < stop:
        group = i32(divide(u32(unit), u32(units)))
        tile = i32(unit - i32(group * units))
        taken = min(warps, i32(stop - unit), i32(units - tile))
        unit = i32(unit + taken)
        if i32(warp // i32(SPLIT)) >= taken:  # nothing to do but to keep step
            for _ in range(chunks):
                barrier_wait(u32(base + u32(slot) * u32(16)), parity)
                if lane == i32(0):
                    barrier_arrive(u32(base + u32(slot) * u32(16) + u32(8)))
                slot, parity = advance(slot, parity, stages)
            continue
        first = i32(group * i32(ROWS))
        last = rows
        if start != u64(0):
            expert = find_expert(table, experts, group, i32(1))
            first = i32(table_start(table, expert) + i32(i32(group - table_groups(table, expert)) * i32(ROWS)))
            last = table_start(table, i32(expert + i32(1)))
        mine = i32(tile + i32(warp // i32(SPLIT)))
        acc = registers(8 * MT, np.float32(0.0))
        kept = registers(4 * MT, u32(0))
        factor = registers(2 * MT, np.float32(0.0))
        fa = registers(16 * MT, u32(0))
        fb = registers(16, u32(0))
        for m in static(MT):  # what the end needs is asked for early
            for h in static(HALVES):
                row = i32(first + i32(m * 16 + h * 8) + here)
                if row < last and mode == SCALED:
                    factor[2 * m + h] = row_weight(extra, row)
                if row < last and mode == RESIDUAL:
                    for t in static(2):
                        column = i32(mine * i32(16) + i32(t * 8) + pair)
                        if column < columns:
                            kept[4 * m + 2 * h + t] = residual_pair(extra, out_row, columns, row, column)
        barrier_wait(u32(base + u32(slot) * u32(16)), parity)
        wa = u32(ring + u32(slot) * stage_size + wo)
        xa = u32(ring + u32(slot) * stage_size + xo)
        for s in static(2):
            r = ldmatrix_x4(u32(u32(wa ^ u32(((0 + s) & 3) * 32)) + u32(((0 + s) >> 2) * 2048)))
            for i in static(4):
                fb[4 * (0 + s) + i] = r[i]
            if ROWS > 8:
                for m in static(MT):
                    r = ldmatrix_x4(u32(xa + u32(m * 16 * X_PITCH + (0 + s) * 32)))
                    for i in static(4):
                        fa[4 * (MT * (0 + s) + m) + i] = r[i]
        if ROWS == 8:
            r = ldmatrix_x4(u32(xa + u32((0) * 32)))
            for i in static(4):
                fa[2 * (0) + i] = r[i]
        for c in range(whole):
            # two k steps at a time: the next two are fetched before these are multiplied
            freed = u32(base + u32(slot) * u32(16) + u32(8))
            for q in static(4):
                if q < 3:
                    for s in static(2):
                        r = ldmatrix_x4(
                            u32(u32(wa ^ u32(((2 * (q + 1) + s) & 3) * 32)) + u32(((2 * (q + 1) + s) >> 2) * 2048))
                        )
                        for i in static(4):
                            fb[4 * ((q + 1) % 2 * 2 + s) + i] = r[i]
                        if ROWS > 8:
                            for m in static(MT):
                                r = ldmatrix_x4(u32(xa + u32(m * 16 * X_PITCH + (2 * (q + 1) + s) * 32)))
                                for i in static(4):
                                    fa[4 * (MT * ((q + 1) % 2 * 2 + s) + m) + i] = r[i]
                    if ROWS == 8:
                        r = ldmatrix_x4(u32(xa + u32((2 * (q + 1)) * 32)))
                        for i in static(4):
                            fa[2 * ((q + 1) % 2 * 2) + i] = r[i]
                else:
                    slot, parity = advance(slot, parity, stages)
                    if i32(c + i32(1)) < chunks:
                        barrier_wait(u32(base + u32(slot) * u32(16)), parity)
                        wa = u32(ring + u32(slot) * stage_size + wo)
                        xa = u32(ring + u32(slot) * stage_size + xo)
                        for s in static(2):
                            r = ldmatrix_x4(u32(u32(wa ^ u32(((0 + s) & 3) * 32)) + u32(((0 + s) >> 2) * 2048)))
                            for i in static(4):
                                fb[4 * (0 + s) + i] = r[i]
                            if ROWS > 8:
                                for m in static(MT):
                                    r = ldmatrix_x4(u32(xa + u32(m * 16 * X_PITCH + (0 + s) * 32)))
                                    for i in static(4):
                                        fa[4 * (MT * (0 + s) + m) + i] = r[i]
                        if ROWS == 8:
                            r = ldmatrix_x4(u32(xa + u32((0) * 32)))
                            for i in static(4):
                                fa[2 * (0) + i] = r[i]
                for s in static(2):
                    if ROWS == 8:
                        d = mma(
                            fb[4 * (q % 2 * 2 + s)], fb[4 * (q % 2 * 2 + s) + 1],
                            fb[4 * (q % 2 * 2 + s) + 2], fb[4 * (q % 2 * 2 + s) + 3],
                            fa[2 * (q % 2 * 2 + s)], fa[2 * (q % 2 * 2 + s) + 1], acc[0], acc[1], acc[2], acc[3],
                        )  # fmt: skip
                        for i in static(4):
                            acc[i] = d[i]
                    else:
                        for m in static(MT):
                            for t in static(2):
                                d = mma(
                                    fa[4 * (MT * (q % 2 * 2 + s) + m) + 0], fa[4 * (MT * (q % 2 * 2 + s) + m) + 1],
                                    fa[4 * (MT * (q % 2 * 2 + s) + m) + 2], fa[4 * (MT * (q % 2 * 2 + s) + m) + 3],
                                    fb[4 * (q % 2 * 2 + s) + 2 * t], fb[4 * (q % 2 * 2 + s) + 2 * t + 1],
                                    acc[8 * m + 4 * t], acc[8 * m + 4 * t + 1],
                                    acc[8 * m + 4 * t + 2], acc[8 * m + 4 * t + 3],
                                )  # fmt: skip
                                for i in static(4):
                                    acc[8 * m + 4 * t + i] = d[i]
            cuda.syncwarp()
            if lane == i32(0):
                barrier_arrive(freed)
        if rest > i32(0):
            for s in range(rest):
                r = ldmatrix_x4(u32(u32(wa ^ u32(u32(s & 3) * u32(32))) + u32(u32(s >> 2) * u32(2048))))
                for i in static(4):
                    fb[i] = r[i]
                if ROWS == 8:
                    e = ldmatrix_x2(u32(xa + u32(s) * u32(32)))
                    fa[0] = e[0]
                    fa[1] = e[1]
                else:
                    for m in static(MT):
                        r = ldmatrix_x4(u32(xa + u32(m * 16 * X_PITCH) + u32(s) * u32(32)))
                        for i in static(4):
                            fa[4 * m + i] = r[i]
                if ROWS == 8:
                    d = mma(
                        fb[0], fb[1], fb[2], fb[3],
                        fa[0], fa[1], acc[0], acc[1], acc[2], acc[3],
                    )  # fmt: skip
                    for i in static(4):
                        acc[i] = d[i]
                else:
                    for m in static(MT):
                        for t in static(2):
                            d = mma(
                                fa[4 * m + 0], fa[4 * m + 1],
                                fa[4 * m + 2], fa[4 * m + 3],
                                fb[2 * t], fb[2 * t + 1],
                                acc[8 * m + 4 * t], acc[8 * m + 4 * t + 1],
                                acc[8 * m + 4 * t + 2], acc[8 * m + 4 * t + 3],
                            )  # fmt: skip
                            for i in static(4):
                                acc[8 * m + 4 * t + i] = d[i]
            cuda.syncwarp()
            if lane == i32(0):
                barrier_arrive(u32(base + u32(slot) * u32(16) + u32(8)))
            slot, parity = advance(slot, parity, stages)
        if ROWS == 8:
            # the thread holds outputs l / 4 and l / 4 + 8 of two rows: its neighbour gives the pair's other half of one
            odd = i32(lane & i32(4)) != i32(0)
            p = shuffle_xor(acc[0] if odd else acc[1], i32(4))
            q = shuffle_xor(acc[2] if odd else acc[3], i32(4))
            low = pack(p, acc[1]) if odd else pack(acc[0], p)
            high = pack(q, acc[3]) if odd else pack(acc[2], q)
        for m in static(MT):
            for h in static(HALVES):
                row = i32(first + i32(m * 16 + h * 8) + here)
                if row < last:
                    if ROWS > 8:
                        low = pack(acc[8 * m + 2 * h], acc[8 * m + 2 * h + 1])
                        high = pack(acc[8 * m + 4 + 2 * h], acc[8 * m + 4 + 2 * h + 1])
                    if mode == SWIGLU:
                        column = i32(mine * i32(8) + pair)
                        store_pair(out, out_row, columns, mode, row, column, swiglu_pair(low, high))
                    else:
                        if mode == RESIDUAL:
                            low = add_pair(low, kept[4 * m + 2 * h])
                            high = add_pair(high, kept[4 * m + 2 * h + 1])
                        elif mode == SCALED:
                            low, high = scale_pair(low, factor[2 * m + h]), scale_pair(high, factor[2 * m + h])
                        column = i32(mine * i32(16) + pair)
                        store_pair(out, out_row, columns, mode, row, column, low)
                        store_pair(out, out_row, columns, mode, row, i32(column + i32(8)), high)


ARGUMENTS = "u64 i32 i32 i32 u64 i64 i32 u64 i32 i32 i32 u64 u64 i32 u64 i32 i32 i32"


def threads(rows: int, warps: int) -> int:
    """Threads of a block: consumers of `warps` units a round, the weight warp, the row warps."""
    _, split, row_warps = SHAPES[rows]
    return 32 * (warps * split + 1 + row_warps)


def _make(rows: int) -> Kernel:
    most, split, row_warps = SHAPES[rows]
    known: dict[str, Any] = {
        "ROWS": rows, "SHIFT": rows.bit_length() - 1, "MT": max(1, rows // 16 // split),
        "HALVES": 1 if rows == 8 else 2, "SPLIT": split,
        "X_WARPS": row_warps, "X_COPIES": rows // 2 // row_warps, "CHUNK": CHUNK,
        "UNIT_CHUNK": UNIT_CHUNK, "X_PITCH": X_PITCH, "RING": RING,
    }  # fmt: skip
    register = kernel(
        ARGUMENTS,
        threads=threads(rows, most),
        dynamic_shared=BUDGET if rows <= 16 else 2 * BUDGET,
        architectures=BULK,
        name=f"ring_product_{rows}",
    )
    return register(unrolled(_ring, **known))


RING_PRODUCTS = {rows: _make(rows) for rows in SHAPES}
"""By the most rows of a group."""
