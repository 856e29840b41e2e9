"""Products with few rows, at the speed of memory (sm_90 and newer).

One block a multiprocessor. A producer warp streams the block's units of weights, and beside them the same k of the
activations, through a ring of shared memory by bulk copies; each consumer warp owns one unit (16 outputs a row) of a
round and adds in ascending k. The weights of the first stages are asked for before the kernel waits for the kernel
that makes its activations. With experts, a group is up to ROWS rows of one expert, and a round is of one group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from .compiler import BULK, Kernel, kernel
from .functions import pack
from .products import RESIDUAL, SCALED, SWIGLU, TABLE_BYTES, add_pair, find_expert, group_table, residual_pair, row_weight
from .products import scale_pair, store_pair, swiglu_pair, table_groups, table_start
from .ptx import async_fence, barrier_arrive, barrier_expect, barrier_init, barrier_init_fence, barrier_wait
from .ptx import bulk_copy, bulk_copy_hinted, dependency_wait, dependents_start, divide, evict_first
from .ptx import ldmatrix_x2, ldmatrix_x4, load_fresh, mma, shared_address
from .unroll import registers, static, unrolled

WARPS = 8
"""Most consumer warps; one more warp is the producer."""
STAGES = 32
"""Most stages of the ring."""
CHUNK = 128
"""k of a stage."""
UNIT_CHUNK = 16 * CHUNK * 2
X_PITCH = CHUNK * 2 + 16  # shared memory from row to row of activations; 16 more, so that ldmatrix meets no bank twice
RING = 512 + TABLE_BYTES + 496  # barriers, group table, then the stages
BUDGET = 112 << 10
"""Shared memory of a block: two kernels fit a multiprocessor, so the next one's weights can already come in."""

u32, i32, u64 = np.uint32, np.int32, np.uint64


def stage_bytes(rows: int, warps: int) -> int:
    return warps * UNIT_CHUNK + rows * X_PITCH


def _ring(
    x, x_row, rows, depth, w, expert_bytes, units, out, out_row, columns, mode, extra, start, experts, gather, warps, stages,
    early,
):  # fmt: skip
    base = u32(u32(shared_address(cuda.shared.array(0, np.uint8)) + u32(127)) & u32(0xFFFFFF80))
    tid = i32(cuda.threadIdx.x)
    lane = i32(tid & i32(31))
    warp = i32(tid >> i32(5))
    table = u32(base + u32(512))
    ring = u32(base + u32(RING))
    stage_size = u32(u32(warps) * u32(UNIT_CHUNK) + u32(ROWS * X_PITCH))
    if tid == i32(0):
        for s in range(stages):
            barrier_init(u32(base + u32(s) * u32(16)), u32(1))
            barrier_init(u32(base + u32(s) * u32(16) + u32(8)), u32(warps))
        barrier_init_fence()
        async_fence()
    if early == i32(0):  # the group table, and so the weights' addresses, come from the kernel before
        dependency_wait()
    dependents_start()
    groups = i32(i32(rows + i32(ROWS - 1)) // i32(ROWS))
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
    chunks = i32(i32(depth + i32(CHUNK - 1)) // i32(CHUNK))
    unit_bytes = i32(i32(i32(depth + i32(63)) // i32(64)) * i32(2048))
    slot = i32(0)
    if warp < warps:
        parity = u32(0)
        # weights: row l % 8 of the unit's half (l / 16), 16-byte piece (l / 8) % 2 of the k step; swizzled by the row
        wo = u32(u32(lane >> i32(4)) * u32(1024) + u32(lane & i32(7)) * u32(128))
        wo = u32(wo + u32(u32(u32(lane >> i32(3)) & u32(1)) ^ u32(lane & i32(7))) * u32(16))
        if HALF == 1:
            xo = u32(u32(lane & i32(7)) * u32(X_PITCH) + u32(u32(lane >> i32(3)) & u32(1)) * u32(16))
        else:
            xo = u32(u32(lane & i32(15)) * u32(X_PITCH) + u32(lane >> i32(4)) * u32(16))
        xo = u32(xo + u32(warps) * u32(UNIT_CHUNK))
        wo = u32(wo + u32(warp) * u32(UNIT_CHUNK))
        dependency_wait()
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
            mine = i32(tile + warp)
            busy = warp < taken
            acc = registers(8 * MT, np.float32(0.0))
            kept = registers(4 * MT, u32(0))
            for c in range(chunks):
                barrier_wait(u32(base + u32(slot) * u32(16)), parity)
                if busy:
                    if mode == RESIDUAL and c == 0:  # asked for early, needed at the end
                        for m in static(MT):
                            for h in static(2 - HALF):
                                row = i32(first + i32(m * 16 + h * 8) + i32(lane >> i32(2)))
                                if row < last:
                                    for t in static(2):
                                        column = i32(mine * i32(16) + i32(t * 8) + i32(i32(lane & i32(3)) * i32(2)))
                                        if column < columns:
                                            kept[4 * m + 2 * h + t] = residual_pair(extra, out_row, columns, row, column)
                    wa = u32(ring + u32(slot) * stage_size + wo)
                    xa = u32(ring + u32(slot) * stage_size + xo)
                    steps = min(i32(CHUNK // 16), i32(i32(depth - i32(c * CHUNK)) >> i32(4)))
                    if steps == i32(CHUNK // 16):
                        for s in static(CHUNK // 16):
                            b = ldmatrix_x4(u32(u32(wa ^ u32((s & 3) * 32)) + u32((s >> 2) * 2048)))
                            for m in static(MT):
                                if HALF == 1:
                                    e = ldmatrix_x2(u32(xa + u32(s * 32)))
                                    a = (e[0], u32(0), e[1], u32(0))
                                else:
                                    a = ldmatrix_x4(u32(xa + u32(m * 16 * X_PITCH + s * 32)))
                                for t in static(2):
                                    d = mma(
                                        a[0], a[1], a[2], a[3], b[2 * t], b[2 * t + 1], acc[8 * m + 4 * t],
                                        acc[8 * m + 4 * t + 1], acc[8 * m + 4 * t + 2], acc[8 * m + 4 * t + 3],
                                    )  # fmt: skip
                                    acc[8 * m + 4 * t] = d[0]
                                    acc[8 * m + 4 * t + 1] = d[1]
                                    acc[8 * m + 4 * t + 2] = d[2]
                                    acc[8 * m + 4 * t + 3] = d[3]
                    else:
                        for s in range(steps):
                            b = ldmatrix_x4(u32(u32(wa ^ u32(u32(s & 3) * u32(32))) + u32(u32(s >> 2) * u32(2048))))
                            for m in static(MT):
                                if HALF == 1:
                                    e = ldmatrix_x2(u32(xa + u32(s) * u32(32)))
                                    a = (e[0], u32(0), e[1], u32(0))
                                else:
                                    a = ldmatrix_x4(u32(xa + u32(m * 16 * X_PITCH) + u32(s) * u32(32)))
                                for t in static(2):
                                    d = mma(
                                        a[0], a[1], a[2], a[3], b[2 * t], b[2 * t + 1], acc[8 * m + 4 * t],
                                        acc[8 * m + 4 * t + 1], acc[8 * m + 4 * t + 2], acc[8 * m + 4 * t + 3],
                                    )  # fmt: skip
                                    acc[8 * m + 4 * t] = d[0]
                                    acc[8 * m + 4 * t + 1] = d[1]
                                    acc[8 * m + 4 * t + 2] = d[2]
                                    acc[8 * m + 4 * t + 3] = d[3]
                cuda.syncwarp()
                if lane == i32(0):
                    barrier_arrive(u32(base + u32(slot) * u32(16) + u32(8)))
                slot = i32(slot + i32(1))
                if slot == stages:
                    slot = i32(0)
                    parity = u32(parity ^ u32(1))
            if busy:
                for m in static(MT):
                    for h in static(2 - HALF):
                        row = i32(first + i32(m * 16 + h * 8) + i32(lane >> i32(2)))
                        if row < last:
                            low = pack(acc[8 * m + 2 * h], acc[8 * m + 2 * h + 1])
                            high = pack(acc[8 * m + 4 + 2 * h], acc[8 * m + 4 + 2 * h + 1])
                            pair = i32(i32(lane & i32(3)) * i32(2))
                            if mode == SWIGLU:
                                column = i32(mine * i32(8) + pair)
                                store_pair(out, out_row, columns, mode, row, column, swiglu_pair(low, high))
                            else:
                                if mode == RESIDUAL:
                                    low = add_pair(low, kept[4 * m + 2 * h])
                                    high = add_pair(high, kept[4 * m + 2 * h + 1])
                                elif mode == SCALED:
                                    weight = row_weight(extra, row)
                                    low, high = scale_pair(low, weight), scale_pair(high, weight)
                                column = i32(mine * i32(16) + pair)
                                store_pair(out, out_row, columns, mode, row, column, low)
                                store_pair(out, out_row, columns, mode, row, i32(column + i32(8)), high)
            unit = i32(unit + taken)
    else:
        parity = u32(1)
        begun = i32(0)
        policy = evict_first()
        while unit < stop:
            group = i32(divide(u32(unit), u32(units)))
            tile = i32(unit - i32(group * units))
            taken = min(warps, i32(stop - unit), i32(units - tile))
            expert = i32(0)
            first = i32(group * i32(ROWS))
            last = rows
            if start != u64(0):
                expert = find_expert(table, experts, group, i32(1))
                first = i32(table_start(table, expert) + i32(i32(group - table_groups(table, expert)) * i32(ROWS)))
                last = table_start(table, i32(expert + i32(1)))
            count = min(i32(ROWS), i32(last - first))
            source = u64(w + u64(expert) * u64(expert_bytes) + u64(i32(tile + lane)) * u64(unit_bytes))
            ahead = i32(0)
            if begun == i32(0):  # the ring is empty: all it holds, before the activations exist
                ahead = min(stages, chunks)
                for c in range(ahead):
                    part = min(i32(UNIT_CHUNK), i32(unit_bytes - i32(c * UNIT_CHUNK)))
                    x_part = min(i32(CHUNK * 2), i32(i32(depth * i32(2)) - i32(c * CHUNK * 2)))
                    full = u32(base + u32(c) * u32(16))
                    if lane == i32(0):
                        barrier_expect(full, u32(u32(taken * part) + u32(count * x_part)))
                    cuda.syncwarp()
                    if lane < taken:
                        to = u32(ring + u32(c) * stage_size + u32(lane) * u32(UNIT_CHUNK))
                        bulk_copy_hinted(to, u64(source + u64(c * UNIT_CHUNK)), u32(part), full, policy)
                dependency_wait()
            x_from = registers(X_ROWS, u64(0))
            for j in static(X_ROWS):
                if i32(lane + i32(j * 32)) < count:
                    row = i32(first + lane + i32(j * 32))
                    if gather != u64(0):
                        row = load_fresh(u64(gather + u64(row) * u64(4)))
                    x_from[j] = u64(x + u64(row) * u64(x_row))
            for c in range(chunks):
                part = min(i32(UNIT_CHUNK), i32(unit_bytes - i32(c * UNIT_CHUNK)))
                x_part = min(i32(CHUNK * 2), i32(i32(depth * i32(2)) - i32(c * CHUNK * 2)))
                full = u32(base + u32(slot) * u32(16))
                to = u32(ring + u32(slot) * stage_size)
                if c >= ahead:
                    barrier_wait(u32(full + u32(8)), parity)
                    if lane == i32(0):
                        barrier_expect(full, u32(u32(taken * part) + u32(count * x_part)))
                    cuda.syncwarp()
                    if lane < taken:
                        at = u32(to + u32(lane) * u32(UNIT_CHUNK))
                        bulk_copy_hinted(at, u64(source + u64(c * UNIT_CHUNK)), u32(part), full, policy)
                to = u32(to + u32(warps) * u32(UNIT_CHUNK) + u32(lane) * u32(X_PITCH))
                for j in static(X_ROWS):
                    if i32(lane + i32(j * 32)) < count:
                        at = u32(to + u32(j * 32 * X_PITCH))
                        bulk_copy(at, u64(x_from[j] + u64(c * CHUNK * 2)), u32(x_part), full)
                slot = i32(slot + i32(1))
                if slot == stages:
                    slot = i32(0)
                    parity = u32(parity ^ u32(1))
            begun = i32(1)
            unit = i32(unit + taken)


ARGUMENTS = "u64 i32 i32 i32 u64 i64 i32 u64 i32 i32 i32 u64 u64 i32 u64 i32 i32 i32"


def _make(rows: int) -> Kernel:
    known: dict[str, Any] = {
        "ROWS": rows, "SHIFT": rows.bit_length() - 1, "MT": max(1, rows // 16), "HALF": int(rows == 8),
        "X_ROWS": max(1, rows // 32), "CHUNK": CHUNK, "UNIT_CHUNK": UNIT_CHUNK, "X_PITCH": X_PITCH, "RING": RING,
    }  # fmt: skip
    register = kernel(
        ARGUMENTS,
        threads=32 * (WARPS + 1),
        dynamic_shared=BUDGET if rows <= 16 else 2 * BUDGET,
        architectures=BULK,
        name=f"ring_product_{rows}",
    )
    return register(unrolled(_ring, **known))


RING_PRODUCTS = {rows: _make(rows) for rows in (8, 16, 32, 64)}
"""By the most rows of a group."""

__all__ = ["BUDGET", "RING", "RING_PRODUCTS", "STAGES", "WARPS", "registers", "stage_bytes", "static"]
