"""Scalar operations as single PTX instructions, and the same names in plain Python for Numba's CUDA simulator.

PTX: https://docs.nvidia.com/cuda/parallel-thread-execution; the section of each instruction stands beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import cuda
from numba.core import config
from numba.cuda import types
from numba.cuda.extending import intrinsic

SIMULATED = bool(config.ENABLE_CUDASIM)

device = cuda.jit(device=True) if SIMULATED else cuda.jit(device=True, forceinline=True)
"""Decorates a function that only kernels call."""

_KINDS = {
    "h": (ir.IntType(16), types.uint16),
    "r": (ir.IntType(32), types.uint32),
    "i": (ir.IntType(32), types.int32),
    "l": (ir.IntType(64), types.uint64),
    "f": (ir.FloatType(), types.float32),
}


def instruction(text: str, inputs: str, outputs: str = "", *, memory: bool = False) -> Any:
    """An intrinsic that is one piece of PTX. `inputs` and `outputs` have one letter an operand (h, r, i, l, f: 16, 32
    (unsigned, signed), 64 bits and float32); `$0` is the first output. Several outputs come as a tuple.
    memory: it reads or writes memory, or must not be moved or merged for another reason."""
    ins, outs = [_KINDS[c] for c in inputs], [_KINDS[c] for c in outputs]
    letters = [f"={c}" for c in outputs.replace("i", "r")] + list(inputs.replace("i", "r"))
    constraints = ",".join(letters + (["~{memory}"] if memory else []))
    value: Any = types.void if not outs else outs[0][1]
    returned: Any = ir.VoidType() if not outs else outs[0][0]
    if len(outs) > 1:
        returned = ir.LiteralStructType([o[0] for o in outs])
        value = types.UniTuple(outs[0][1], len(outs))
    signature = value(*[i[1] for i in ins])

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        asm = ir.InlineAsm(ir.FunctionType(returned, [i[0] for i in ins]), text, constraints, side_effect=memory)
        result = builder.call(asm, args)
        if not outs:
            return context.get_dummy_value()
        if len(outs) == 1:
            return result
        return context.make_tuple(builder, value, [builder.extract_value(result, i) for i in range(len(outs))])

    names = "".join(f", a{i}" for i in range(len(ins)))
    space: dict[str, Any] = {"signature": signature, "codegen": codegen}
    exec(f"def op(typingctx{names}):\n    return signature, codegen\n", space)
    return intrinsic(space["op"])


def _bitcast(source: Any, target: Any, kind: Any) -> Any:
    @intrinsic
    def cast(typingctx, x):
        def codegen(context, builder, sig, args):
            return builder.bitcast(args[0], kind)

        return target(source), codegen

    return cast


def address_of(array_type: Any, context: Any, builder: Any, array: Any, index: Any) -> Any:
    """LLVM pointer to `array[index]`, as 64 bits."""
    pointer = isinstance(array_type, types.CPointer)
    data = array if pointer else context.make_array(array_type)(context, builder, array).data
    return builder.ptrtoint(builder.gep(data, [index]), ir.IntType(64))


def _load_1(typingctx: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = address_of(sig.args[0], context, builder, args[0], args[1])
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(64)])
        return builder.call(ir.InlineAsm(kind, "ld.global.u32 $0, [$1];", "=r,l,~{memory}", side_effect=True), [at])

    return types.uint32(array, types.int64), codegen


def _loads_4(space: str) -> Any:
    def op(typingctx, array, index):
        def codegen(context, builder, sig, args):
            at = address_of(sig.args[0], context, builder, args[0], args[1])
            kind = ir.FunctionType(ir.LiteralStructType([ir.IntType(32)] * 4), [ir.IntType(64)])
            text = f"ld{space}.v4.u32 {{$0,$1,$2,$3}}, [$4];"
            result = builder.call(ir.InlineAsm(kind, text, "=r,=r,=r,=r,l,~{memory}", side_effect=True), [at])
            return context.make_tuple(builder, sig.return_type, [builder.extract_value(result, i) for i in range(4)])

        return types.UniTuple(types.uint32, 4)(array, types.int64), codegen

    return intrinsic(op)


def _stores_4(space: str) -> Any:
    def op(typingctx, array, index, a, b, c, d):
        def codegen(context, builder, sig, args):
            at = address_of(sig.args[0], context, builder, args[0], args[1])
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] + [ir.IntType(32)] * 4)
            text = f"st{space}.v4.u32 [$0], {{$1,$2,$3,$4}};"
            builder.call(ir.InlineAsm(kind, text, "l,r,r,r,r,~{memory}", side_effect=True), [at, *args[2:]])
            return context.get_dummy_value()

        return types.void(array, types.int64, *[types.uint32] * 4), codegen

    return intrinsic(op)


@intrinsic
def _atomic_add(typingctx, array, index, value):
    def codegen(context, builder, sig, args):
        at = address_of(sig.args[0], context, builder, args[0], args[1])
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(64), ir.IntType(32)])
        text = "atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;"
        return builder.call(ir.InlineAsm(kind, text, "=r,l,r,~{memory}", side_effect=True), [at, args[2]])

    return types.uint32(array, types.int64, types.uint32), codegen


def _simulated() -> dict[str, Any]:
    f32, u32 = np.float32, np.uint32

    def single(function: Any) -> Any:
        def run(*args: Any) -> Any:
            with np.errstate(all="ignore"):
                return f32(function(*[np.float64(a) for a in args]))

        return run

    def bf16_bits(x: Any) -> Any:
        if np.isnan(x):
            return np.uint16(0x7FFF)
        bits = int(f32(x).view(u32))
        return np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)

    def load1(array: Any, index: Any) -> Any:
        return u32(array[int(index)])

    def load4(array: Any, index: Any) -> Any:
        return tuple(u32(array[int(index) + i]) for i in range(4))

    def atomic_add(array: Any, index: Any, value: Any) -> Any:
        before = u32(array[int(index)])
        array[int(index)] = before + u32(value)
        return before

    def store4(array: Any, index: Any, *values: Any) -> None:
        for i, value in enumerate(values):
            array[int(index) + i] = value

    def give_up() -> None:
        raise RuntimeError("a kernel gave up")

    @cuda.jit(device=True)
    def mma(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
        every = cuda.shared.array((1024, 6), np.uint32)
        at = cuda.threadIdx.x
        every[at] = (a0, a1, a2, a3, b0, b1)
        cuda.syncthreads()
        lane, warp = at % 32, at // 32 * 32

        def half(word, k):
            return np.float64(u32((int(word) >> 16 * (k & 1) & 0xFFFF) << 16).view(f32))

        def entry(row, column):
            return sum(
                half(every[warp + row % 8 * 4 + k % 8 // 2, row // 8 + k // 8 * 2], k)
                * half(every[warp + column * 4 + k % 8 // 2, 4 + k // 8], k)
                for k in range(16)
            )

        row, column = lane // 4, lane % 4 * 2
        out = (
            f32(c0 + entry(row, column)),
            f32(c1 + entry(row, column + 1)),
            f32(c2 + entry(row + 8, column)),
            f32(c3 + entry(row + 8, column + 1)),
        )
        cuda.syncthreads()
        return out

    @cuda.jit(device=True)
    def warp_largest(x):
        every = cuda.shared.array(1024, np.uint32)
        at = cuda.threadIdx.x
        every[at] = x
        cuda.syncthreads()
        y = max(every[at // 32 * 32 + i] for i in range(32))
        cuda.syncthreads()
        return y

    @cuda.jit(device=True)
    def ballot(x):
        votes = cuda.shared.array(1024, np.uint32)
        at = cuda.threadIdx.x
        votes[at] = x
        cuda.syncthreads()
        y = np.uint32(sum(1 << i for i in range(32) if votes[at // 32 * 32 + i]))
        cuda.syncthreads()
        return y

    @cuda.jit(device=True)
    def shuffle_xor(x, mask):
        lanes = cuda.shared.array(1024, np.float32)
        at = cuda.threadIdx.x
        lanes[at] = x
        cuda.syncthreads()
        y = lanes[at ^ mask]
        cuda.syncthreads()
        return y

    return {
        "float_of": lambda x: u32(x).view(f32),
        "bits_of": lambda x: f32(x).view(u32),
        "add": single(lambda a, b: a + b),
        "sub": single(lambda a, b: a - b),
        "mul": single(lambda a, b: a * b),
        "fma": single(lambda a, b, c: a * b + c),
        "div": single(lambda a, b: a / b),
        "sqrt": single(np.sqrt),
        "larger": single(np.fmax),
        "exp2_approx": single(np.exp2),
        "log2_approx": single(np.log2),
        "cosine": single(np.cos),
        "bf16_bits": bf16_bits,
        "high_product": lambda a, b: np.uint64(int(a) * int(b) >> 64),
        "to_weight": lambda x: np.uint64(int(np.float64(x) * 2.0**40)),
        "pack": lambda low, high: u32(int(bf16_bits(low)) | int(bf16_bits(high)) << 16),
        "give_up": give_up,
        "let_next_start": lambda: None,
        "wait_for_earlier": lambda: None,
        "warp_largest": warp_largest,
        "ballot": ballot,
        "shuffle_xor": shuffle_xor,
        "mma": mma,
        "atomic_add": atomic_add,
        "load1": load1,
        "load4": load4,
        "store4": store4,
        "load4_shared": load4,
        "store4_shared": store4,
    }


float_of = _bitcast(types.uint32, types.float32, ir.FloatType())
bits_of = _bitcast(types.float32, types.uint32, ir.IntType(32))
add = instruction("add.rn.f32 $0, $1, $2;", "ff", "f")  # [9.7.3.4]
sub = instruction("sub.rn.f32 $0, $1, $2;", "ff", "f")  # [9.7.3.5]
mul = instruction("mul.rn.f32 $0, $1, $2;", "ff", "f")  # [9.7.3.6]
fma = instruction("fma.rn.f32 $0, $1, $2, $3;", "fff", "f")  # [9.7.3.7]
div = instruction("div.rn.f32 $0, $1, $2;", "ff", "f")  # [9.7.3.8]
sqrt = instruction("sqrt.rn.f32 $0, $1;", "f", "f")  # [9.7.3.14]
larger = instruction("max.f32 $0, $1, $2;", "ff", "f")  # [9.7.3.12] a number rather than a NaN
exp2_approx = instruction("ex2.approx.ftz.f32 $0, $1;", "f", "f")  # [9.7.3.20] 2 units in the last place
log2_approx = instruction("lg2.approx.f32 $0, $1;", "f", "f")  # [9.7.3.19]
cosine = instruction("cos.approx.f32 $0, $1;", "f", "f")  # [9.7.3.18]
bf16_bits = instruction("cvt.rn.bf16.f32 $0, $1;", "f", "h")  # [9.7.9.22]
pack = instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", "ff", "r")  # [9.7.9.22] the first in the low half
high_product = instruction("mul.hi.u64 $0, $1, $2;", "ll", "l")  # [9.7.1.3]
# a number in [0, 1] as a whole number of 2**-40, cut off
to_weight = instruction(
    "{ .reg .f64 d; cvt.f64.f32 d, $1; mul.rn.f64 d, d, 0d4270000000000000; cvt.rzi.u64.f64 $0, d; }", "f", "l"
)
shuffle_xor = instruction("shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;", "fi", "f", memory=True)  # [9.7.9.6]
warp_largest = instruction("redux.sync.max.u32 $0, $1, 0xffffffff;", "r", "r", memory=True)  # [9.7.13.8]
# the lanes whose operand isn't 0 [9.7.13.5]
ballot = instruction(
    "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }", "r", "r", memory=True
)
# Programmatic dependent launch [9.7.13.12-13]: the next kernel may begin; wait for the end of the one before. A
# kernel that
# may be launched that way waits before it touches what others write or read.
give_up = instruction("trap;", "", memory=True)  # ends the kernel with an error [9.7.20.6]
let_next_start = instruction("griddepcontrol.launch_dependents;", "", memory=True)
wait_for_earlier = instruction("griddepcontrol.wait;", "", memory=True)
# 4 bytes at array[index] (uint32) in global memory, asked for where it stands and not where it is used [9.7.9.8]
load1 = intrinsic(_load_1)
# 16 bytes at array[index:index + 4] (uint32, 16-byte aligned) in global memory, and in a shared array [9.7.9.8,
# 9.7.9.11]
load4, store4 = _loads_4(".global"), _stores_4(".global")
# adds to array[index] in global memory and gives what was there, with acquire and release [9.7.13.3]
atomic_add = _atomic_add
load4_shared, store4_shared = _loads_4(""), _stores_4("")
# c[16, 8] + a[16, 16] b[16, 8] of a warp in bf16, float32 sums [9.7.14.5.8]. Lane l: a0..a3 = pairs of rows l / 4 and
# l / 4 + 8
# at k = 2 (l % 4), then at k + 8; b0, b1 = pairs of column l / 4; c0..c3 = row l / 4, then + 8, at columns 2 (l % 4),
# + 1
mma = instruction(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
    "rrrrrrffff",
    "ffff",
)

if SIMULATED:
    globals().update(_simulated())
