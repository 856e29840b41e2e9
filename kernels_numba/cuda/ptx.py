"""Inline-PTX intrinsics: tensor cores, asynchronous copies, barriers, raw loads and stores.

Each has one line of what it does and the section of the PTX manual (release 9) that describes it:
https://docs.nvidia.com/cuda/parallel-thread-execution. Addresses of shared memory are 32 bits, global ones 64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from .scalar import address_of, instruction
from .scalar import mma as mma

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()

# Tensor cores

ldmatrix_x4 = instruction("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", "r", "rrrr", memory=True)
"""Four 8 x 8 bf16 matrices from shared memory; lane l gives the address of row l % 8 of matrix l / 8 [9.7.14.5.15]."""

ldmatrix_x4_transposed = instruction(
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];", "r", "rrrr", memory=True
)
"""The same, each matrix transposed [9.7.14.5.15]."""

ldmatrix_x2 = instruction("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {$0,$1}, [$2];", "r", "rr", memory=True)
"""Two 8 x 8 matrices; lanes 0 to 15 give the addresses [9.7.14.5.15]."""


@cache
def wgmma(columns: int) -> Any:
    """wgmma(acc, a, b): acc + A B for a warpgroup's 64 x 16 by 16 x columns tile, both in shared memory behind
    descriptors; acc is columns / 2 float32 [9.7.15.5.2]."""
    count = columns // 2
    value = types.UniTuple(types.float32, count)

    def op(typingctx, acc, a, b):
        def codegen(context, builder, sig, args):
            registers = ",".join(f"${i}" for i in range(count))
            text = (
                f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
                f"{{{registers}}}, ${2 * count}, ${2 * count + 1}, 1, 1, 1, 0, 0;"
            )
            constraints = ",".join(["=f"] * count + [str(i) for i in range(count)] + ["l", "l"])
            kind = ir.FunctionType(ir.LiteralStructType([_F32] * count), [_F32] * count + [_I64, _I64])
            given = [builder.extract_value(args[0], i) for i in range(count)]
            result = builder.call(ir.InlineAsm(kind, text, constraints, side_effect=True), [*given, *args[1:]])
            return context.make_tuple(builder, value, [builder.extract_value(result, i) for i in range(count)])

        return value(value, types.uint64, types.uint64), codegen

    return intrinsic(op)


@cache
def wgmma_transposed(columns: int) -> Any:
    """wgmma_transposed(acc, a0, a1, a2, a3, b): the same with A as fragments in registers (a 16 x 16 tile a warp, as
    mma's) and B [16, columns] in shared memory with its columns together [9.7.15.5.2]."""
    count = columns // 2
    value = types.UniTuple(types.float32, count)

    def op(typingctx, acc, a0, a1, a2, a3, b):
        def codegen(context, builder, sig, args):
            registers = ",".join(f"${i}" for i in range(count))
            words = ",".join(f"${2 * count + i}" for i in range(4))
            text = (
                f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
                f"{{{registers}}}, {{{words}}}, ${2 * count + 4}, 1, 1, 1, 1;"
            )
            constraints = ",".join(["=f"] * count + [str(i) for i in range(count)] + ["r"] * 4 + ["l"])
            result = ir.LiteralStructType([_F32] * count)
            kind = ir.FunctionType(result, [_F32] * count + [_I32] * 4 + [_I64])
            given = [builder.extract_value(args[0], i) for i in range(count)]
            made = builder.call(ir.InlineAsm(kind, text, constraints, side_effect=True), [*given, *args[1:]])
            return context.make_tuple(builder, value, [builder.extract_value(made, i) for i in range(count)])

        return value(value, *[types.uint32] * 4, types.uint64), codegen

    return intrinsic(op)


@cache
def zeros(count: int) -> Any:
    """zeros(): a tuple of `count` float32 zeros, the accumulators before the first wgmma."""
    value = types.UniTuple(types.float32, count)

    def op(typingctx):
        def codegen(context, builder, sig, args):
            return context.make_tuple(builder, value, [ir.Constant(_F32, 0.0)] * count)

        return value(), codegen

    return intrinsic(op)


wgmma_fence = instruction("wgmma.fence.sync.aligned;", "", memory=True)
"""Orders register accesses before the next wgmma [9.7.15.7.1]."""
wgmma_commit = instruction("wgmma.commit_group.sync.aligned;", "", memory=True)
"""Closes a group of wgmmas [9.7.15.7.2]."""
wgmma_wait_0 = instruction("wgmma.wait_group.sync.aligned 0;", "", memory=True)
"""Waits until no group is running [9.7.15.7.3]."""
wgmma_wait_1 = instruction("wgmma.wait_group.sync.aligned 1;", "", memory=True)
"""Waits until at most the newest group is running [9.7.15.7.3]."""

# Asynchronous copies

cp_async_16 = instruction("cp.async.cg.shared.global [$0], [$1], 16;", "rl", memory=True)
"""16 bytes from global to shared memory, past the first-level cache [9.7.9.25.3.1]."""
cp_async_16_or_zero = instruction("cp.async.cg.shared.global [$0], [$1], 16, $2;", "rlr", memory=True)
"""The same, or 16 zeros where the third operand is 0 and not 16 [9.7.9.25.3.1]."""
cp_async_commit = instruction("cp.async.commit_group;", "", memory=True)
"""Closes a group of this thread's cp.asyncs [9.7.9.25.3.2]."""
cp_async_arrive = instruction("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", "r", memory=True)
"""Arrives at the mbarrier once this thread's cp.asyncs so far have landed [9.7.13.15.17]."""


@cache
def cp_async_wait(groups: int) -> Callable[[], None]:
    """Waits until at most `groups` of this thread's newest groups are running [9.7.9.25.3.3]."""
    return instruction(f"cp.async.wait_group {groups};", "", memory=True)  # type: ignore[no-any-return]


bulk_copy = instruction(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];", "rlrr", memory=True
)
"""bulk_copy(shared, global, bytes, barrier): multiples of 16 bytes, counted by the mbarrier [9.7.9.25.4.1]."""
bulk_copy_hinted = instruction(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [$0], [$1], $2, [$3], $4;",
    "rlrrl",
    memory=True,
)
"""The same with a cache policy [9.7.9.25.4.1]."""
bulk_prefetch = instruction("cp.async.bulk.prefetch.L2.global [$0], $1;", "lr", memory=True)
"""Brings bytes into the second-level cache [9.7.9.25.4.4]."""
evict_first = instruction("createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", "", "l")
"""The cache policy of data read once [9.7.9.18]."""

# mbarriers: a phase is over when all arrivals and all promised bytes are in; parity tells phases apart

barrier_init = instruction("mbarrier.init.shared::cta.b64 [$0], $1;", "rr", memory=True)
"""barrier_init(barrier, arrivals a phase) [9.7.13.15.9]."""
barrier_expect = instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "rr", memory=True)
"""Arrives and promises that many bytes more in this phase [9.7.13.15.13]."""
barrier_arrive = instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", "r", memory=True)
"""Arrives; what this thread read and wrote before is ordered before [9.7.13.15.13]."""
barrier_wait = instruction(
    "{ .reg .pred p; .reg .u32 n; mov.u32 n, 0; W: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @p bra D; "
    "add.u32 n, n, 1; setp.lt.u32 p, n, 4000000; @p bra W; trap; D: }",
    "rr",
    memory=True,
)
"""barrier_wait(barrier, parity): until the phase of that parity is over; traps instead of hanging [9.7.13.15.16]."""
barrier_wait_both = instruction(
    "{ .reg .pred p, q; .reg .u32 n; mov.u32 n, 0; W: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; "
    "mbarrier.try_wait.parity.shared::cta.b64 q, [$2], $3; and.pred p, p, q; @p bra D; add.u32 n, n, 1; "
    "setp.lt.u32 p, n, 4000000; @p bra W; trap; D: }",
    "rrrr",
    memory=True,
)
"""The same for two barriers: both are asked before either is waited for [9.7.13.15.16]."""
barrier_test = instruction(
    "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [$1], $2; selp.u32 $0, 1, 0, p; }",
    "rr",
    "r",
    memory=True,
)
"""barrier_test(barrier, parity): 1 if the phase of that parity is over, without waiting [9.7.13.15.16]."""
barrier_init_fence = instruction("fence.mbarrier_init.release.cluster;", "", memory=True)
"""Makes initialised barriers visible to the copy engine [9.7.13.4]."""
async_fence = instruction("fence.proxy.async.shared::cta;", "", memory=True)
"""Orders this thread's plain accesses of shared memory before the copy engine's and tensor cores' [9.7.13.4]."""

# Dependent launch (compiler.py drops both below sm_90)

dependency_wait = instruction("griddepcontrol.wait;", "", memory=True)
"""Waits until the kernels that this one depends on are over and their writes visible [9.7.13.13]."""
dependents_start = instruction("griddepcontrol.launch_dependents;", "", memory=True)
"""Allows the kernel queued next to begin once every block has said so [9.7.13.13]."""

# Memory

load_32 = instruction("ld.global.u32 $0, [$1];", "l", "r", memory=True)
"""4 bytes [9.7.9.8]."""
load_64 = instruction("ld.global.v2.u32 {$0,$1}, [$2];", "l", "rr", memory=True)
"""8 bytes [9.7.9.8]."""
load_128 = instruction("ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", "l", "rrrr", memory=True)
"""16 bytes [9.7.9.8]."""
load_f32 = instruction("ld.global.f32 $0, [$1];", "l", "f", memory=True)
"""A float32 [9.7.9.8]."""
load_fresh = instruction("ld.relaxed.gpu.global.s32 $0, [$1];", "l", "i", memory=True)
"""An int32 as the whole GPU sees it, not from this multiprocessor's cache [9.7.9.8]."""
load_fresh_f32 = instruction("ld.relaxed.gpu.global.f32 $0, [$1];", "l", "f", memory=True)
"""A float32 as the whole GPU sees it [9.7.9.8]."""
store_16 = instruction("st.global.b16 [$0], $1;", "lh", memory=True)
"""2 bytes [9.7.9.11]."""
store_32 = instruction("st.global.u32 [$0], $1;", "lr", memory=True)
"""4 bytes [9.7.9.11]."""
store_128 = instruction("st.global.v4.u32 [$0], {$1,$2,$3,$4};", "lrrrr", memory=True)
"""16 bytes [9.7.9.11]."""
shared_load = instruction("ld.shared.s32 $0, [$1];", "r", "i", memory=True)
"""An int32 from shared memory [9.7.9.8]."""
shared_store_128 = instruction("st.shared.v4.u32 [$0], {$1,$2,$3,$4};", "rrrrr", memory=True)
"""16 bytes to shared memory [9.7.9.11]."""
shared_store = instruction("st.shared.s32 [$0], $1;", "ri", memory=True)
"""An int32 to shared memory [9.7.9.11]."""
shared_load_32 = instruction("ld.shared.u32 $0, [$1];", "r", "r", memory=True)
"""4 bytes from shared memory [9.7.9.8]."""
shared_store_32 = instruction("st.shared.u32 [$0], $1;", "rr", memory=True)
"""4 bytes to shared memory [9.7.9.11]."""

shared_store_128 = instruction("st.shared.v4.u32 [$0], {$1,$2,$3,$4};", "rrrrr", memory=True)
"""16 bytes to shared memory [9.7.9.11]."""
shared_or = instruction("red.shared.or.b32 [$0], $1;", "rr", memory=True)
"""Sets bits of a word in shared memory, whoever else does [9.7.13.7]."""
shared_load_64 = instruction("ld.shared.u64 $0, [$1];", "r", "l", memory=True)
"""8 bytes from shared memory [9.7.9.8]."""
shared_load_128 = instruction("ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", "r", "rrrr", memory=True)
"""16 bytes from shared memory [9.7.9.8]."""

# Words that blocks of one kernel give each other: all ones until they are written. Who reads asks until that is so, and
# traps instead of hanging

publish_32 = instruction("st.relaxed.gpu.global.u32 [$0], $1;", "lr", memory=True)
"""4 bytes that blocks of the same kernel wait for [9.7.9.11]."""


def _expected(rows: int, words: int) -> Any:
    registers = [[f"${words * row + word}" for word in range(words)] for row in range(rows)]
    vector = {1: "u32", 4: "v4.u32"}[words]
    text = "{ .reg .pred p; .reg .u32 n, m; mov.u32 n, 0; P: "
    for row, names in enumerate(registers):
        given = names[0] if words == 1 else "{" + ",".join(names) + "}"
        text += f"ld.relaxed.gpu.global.{vector} {given}, [${rows * words + row}]; "
    text += "mov.u32 m, 0; " + "".join(f"max.u32 m, m, {name}; " for names in registers for name in names)
    text += "setp.ne.u32 p, m, 0xFFFFFFFF; @p bra D; add.u32 n, n, 1; setp.lt.u32 p, n, 4000000; @p bra P; trap; D: }"
    return instruction(text, "l" * rows, "r" * (rows * words), memory=True)


expect_32 = _expected(1, 1)
"""4 bytes once they are written [9.7.9.8]."""
expect_128 = _expected(1, 4)
"""16 bytes once all of them are [9.7.9.8]."""
expect_2_words, expect_4_words = _expected(2, 1), _expected(4, 1)
"""4 bytes at each address once all are [9.7.9.8]."""
expect_2_rows, expect_4_rows, expect_8_rows = _expected(2, 4), _expected(4, 4), _expected(8, 4)
"""16 bytes at each address once all are [9.7.9.8]."""
count_round = instruction("red.relaxed.gpu.global.inc.u32 [$0], $1;", "lr", memory=True)
"""Adds 1 to a word in global memory; what was the second operand becomes 0 [9.7.13.7]."""

# Arithmetic and lanes

reciprocal = instruction("rcp.approx.ftz.f32 $0, $1;", "f", "f")
"""1 / x within 1 unit in the last place [9.7.3.13]."""
divide = instruction("div.u32 $0, $1, $2;", "rr", "r")
"""Unsigned quotient [9.7.1.8]."""
shuffle_xor_32 = instruction("shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;", "ri", "r", memory=True)
"""The 32 bits of lane ^ i [9.7.9.6]."""
shuffle_up = instruction("shfl.sync.up.b32 $0, $1, $2, 0, 0xffffffff;", "ii", "i", memory=True)
"""The value of lane - i; lanes below i keep their own [9.7.9.6]."""
broadcast = instruction("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "ii", "i", memory=True)
"""The value of lane i [9.7.9.6]."""
broadcast_f32 = instruction("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "fi", "f", memory=True)
"""The float32 of lane i [9.7.9.6]."""
population = instruction("popc.b32 $0, $1;", "r", "i")
"""How many bits are set [9.7.1.15]."""
group_sync = instruction("bar.sync $0, $1;", "rr", memory=True)
"""group_sync(number, threads): a barrier for some warps of a block; number 0 is syncthreads [9.7.13.1]."""
group_arrive = instruction("bar.arrive $0, $1;", "rr", memory=True)
"""The same without waiting for the others [9.7.13.1]."""


@intrinsic
def shared_address(typingctx, array):
    """32-bit address of a shared array: cvta.to.shared [9.7.9.20]."""

    def codegen(context, builder, sig, args):
        address = address_of(sig.args[0], context, builder, args[0], ir.Constant(_I64, 0))
        text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
        return builder.call(ir.InlineAsm(ir.FunctionType(_I32, [_I64]), text, "=r,l"), [address])

    return types.uint32(array), codegen
