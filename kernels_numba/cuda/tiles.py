"""Tensor-core tiles: matrix products of 16 x 8 x 16, shared-memory fragments, copies into shared memory.

PTX: https://docs.nvidia.com/cuda/parallel-thread-execution; the section of each instruction stands beside it.
"""

from __future__ import annotations

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from .scalar import address_of, instruction

# c[16, 8] += a[16, 16] b[16, 8] in bf16 with float32 sums [9.7.14.5.8]. Lane l: a0..a3 = pairs of rows l / 4 (+ 8) at
# k = 2 (l % 4) (+ 8); b0, b1 = pairs of column l / 4; c0, c1 = row l / 4, columns 2 (l % 4) + 0, 1; c2, c3 = row + 8
mma = instruction(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
    "rrrrrrffff",
    "ffff",
)
# four 8 x 8 tiles of 16-bit values; lane l gives the address of row l % 8 of tile l / 8 [9.7.14.5.15]
load_tiles = instruction(
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", "r", "rrrr", memory=True
)
load_tiles_transposed = instruction(
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];", "r", "rrrr", memory=True
)
# 16 bytes from global to shared memory, in the background, past L1 [9.7.9.25.3]
copy_async = instruction("cp.async.cg.shared.global [$0], [$1], 16;", "rl", memory=True)
# the same, or 16 zeros where the size is 0
copy_async_or_zero = instruction("cp.async.cg.shared.global [$0], [$1], 16, $2;", "rlr", memory=True)
copies_end_group = instruction("cp.async.commit_group;", "", memory=True)
copies_wait_all = instruction("cp.async.wait_group 0;", "", memory=True)
copies_wait_but_1 = instruction("cp.async.wait_group 1;", "", memory=True)
copies_wait_but_2 = instruction("cp.async.wait_group 2;", "", memory=True)
copies_wait_but_3 = instruction("cp.async.wait_group 3;", "", memory=True)
shared_store = instruction("st.shared.u32 [$0], $1;", "rr", memory=True)


@intrinsic
def global_address(typingctx, array, index):
    """Address of array[index], 64 bits."""

    def codegen(context, builder, sig, args):
        return address_of(sig.args[0], context, builder, args[0], args[1])

    return types.uint64(array, types.int64), codegen


@intrinsic
def shared_address(typingctx, array):
    """Address of a shared array within shared memory, 32 bits: cvta.to.shared [9.7.9.20]."""

    def codegen(context, builder, sig, args):
        at = address_of(sig.args[0], context, builder, args[0], ir.Constant(ir.IntType(64), 0))
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(64)])
        text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
        return builder.call(ir.InlineAsm(kind, text, "=r,l"), [at])

    return types.uint32(array), codegen
