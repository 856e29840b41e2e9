"""Vectors of 16 float32 lanes as values inside compiled functions, and the matrix-product tile built on them.

Everything here lowers to plain LLVM vector code, so it runs on AVX-512, AVX2 and NEON alike. No fast-math flag is set
anywhere and a fused multiply-add is fused only where `fma` is written, so a lane's bits never depend on how LLVM
unrolls, inlines or legalises the code around it.
"""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel
from numba.extending import intrinsic, lower_builtin, overload, register_model, type_callable

LANES = 16
AHEAD = 2048  # weights between the end of a tile and what it prefetches
WEIGHT_LINE = 32  # weights in a cache line
_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I16 = ir.IntType(16)
_VEC = ir.VectorType(_F32, LANES)
_IVEC = ir.VectorType(_I32, LANES)


class Vec16(types.Type):
    """The numba type of 16 float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="Vec16")


vec16 = Vec16()


@register_model(Vec16)
class _Vec16Model(PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _VEC)


# ---------------------------------------------------------------------------------------------- LLVM building blocks


def _address(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    """Pointer to element `offset` (in elements, C order) of a numba array."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [offset], inbounds=True)


def _load_lanes(builder: Any, pointer: Any, element: Any) -> Any:
    """16 neighbouring elements as float32 lanes; 16-bit elements are bf16 bits."""
    if element == types.float32:
        return builder.load(builder.bitcast(pointer, _VEC.as_pointer()), align=4)
    bits = builder.load(builder.bitcast(pointer, ir.VectorType(_I16, LANES).as_pointer()), align=2)
    shift = ir.Constant(_IVEC, [16] * LANES)
    return builder.bitcast(builder.shl(builder.zext(bits, _IVEC), shift), _VEC)


def _store_lanes(builder: Any, vector: Any, pointer: Any) -> None:
    builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=4)


def _call(builder: Any, name: str, *operands: Any) -> Any:
    """Call of the LLVM intrinsic `name` overloaded on its operands' common type."""
    kind = operands[0].type
    suffix = f"v{LANES}f32" if kind == _VEC else "f32"
    function_type = ir.FunctionType(kind, [kind] * len(operands))
    function = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.{name}.{suffix}")
    return builder.call(function, operands)


def _prefetch(builder: Any, pointer: Any) -> None:
    """Ask for the cache line at `pointer`, which need not exist."""
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, keep, data = (ir.Constant(_I32, n) for n in (0, 3, 1))
    builder.call(function, [builder.bitcast(pointer, ir.IntType(8).as_pointer()), read, keep, data])


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _splat(builder: Any, scalar: Any) -> Any:
    vector = ir.VectorType(scalar.type, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return _shuffle(builder, one, one, [0] * LANES)


def _sum_lanes(builder: Any, vectors: list[Any]) -> list[Any]:
    """Lane sums of each vector by one fixed tree (halves added: 8, 4, 2, 1), packed 16 to a vector in order.

    Vectors are folded in pairs, which costs a third of the shuffles and adds the same numbers in the same order.
    """
    packed = []
    for start in range(0, len(vectors), LANES):
        group = vectors[start : start + LANES]
        group = group + [ir.Constant(_VEC, ir.Undefined)] * (LANES - len(group))
        half = LANES // 2
        while half:
            low = [block + lane for block in range(0, 2 * LANES, 2 * half) for lane in range(half)]
            high = [lane + half for lane in low]
            group = [
                builder.fadd(_shuffle(builder, a, b, low), _shuffle(builder, a, b, high))
                for a, b in zip(group[::2], group[1::2], strict=True)
            ]
            half //= 2
        packed.append(group[0])
    return packed


# ----------------------------------------------------------------------------------------------- the vector as a value


@intrinsic
def load(typingctx, array, offset):
    """16 neighbouring elements of a C-order array, from flat element `offset`, as lanes (bf16 bits are widened)."""

    def codegen(context, builder, sig, args):
        pointer = _address(context, builder, sig.args[0], args[0], args[1])
        return _load_lanes(builder, pointer, sig.args[0].dtype)

    return vec16(array, types.intp), codegen


@intrinsic
def store(typingctx, array, offset, value):
    """Write lanes to flat element `offset` of a C-order array; a uint16 array gets bf16 bits (of a rounded value)."""

    def codegen(context, builder, sig, args):
        pointer = _address(context, builder, sig.args[0], args[0], args[1])
        value = args[2]
        if sig.args[0].dtype == types.uint16:
            bits = builder.lshr(builder.bitcast(value, _IVEC), ir.Constant(_IVEC, [16] * LANES))
            value = builder.trunc(bits, ir.VectorType(_I16, LANES))
        builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(array, types.intp, vec16), codegen


@intrinsic
def load_apart(typingctx, array, offset, stride):
    """16 elements of a float32 array from flat element `offset` on, `stride` apart, as lanes."""

    def codegen(context, builder, sig, args):
        lanes = ir.Constant(_VEC, ir.Undefined)
        for lane in range(LANES):
            place = builder.add(args[1], builder.mul(args[2], ir.Constant(args[2].type, lane)))
            value = builder.load(_address(context, builder, sig.args[0], args[0], place))
            lanes = builder.insert_element(lanes, value, ir.Constant(_I32, lane))
        return lanes

    return vec16(array, types.intp, types.intp), codegen


@intrinsic
def load_one(typingctx, array, offset):
    """Element at flat `offset` of a C-order array as float32 (bf16 bits are widened)."""

    def codegen(context, builder, sig, args):
        value = builder.load(_address(context, builder, sig.args[0], args[0], args[1]))
        if sig.args[0].dtype == types.uint16:
            value = builder.bitcast(builder.shl(builder.zext(value, _I32), ir.Constant(_I32, 16)), _F32)
        return value

    return types.float32(array, types.intp), codegen


@intrinsic
def store_one(typingctx, array, offset, value):
    """Write a float32 to flat `offset` of a C-order array; a uint16 array gets bf16 bits (value already rounded)."""

    def codegen(context, builder, sig, args):
        value = args[2]
        if sig.args[0].dtype == types.uint16:
            value = builder.trunc(builder.lshr(builder.bitcast(value, _I32), ir.Constant(_I32, 16)), _I16)
        builder.store(value, _address(context, builder, sig.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), codegen


@intrinsic
def splat(typingctx, value):
    """A float32 in every lane."""

    def codegen(context, builder, sig, args):
        return _splat(builder, args[0])

    return vec16(types.float32), codegen


@intrinsic
def lane_sum(typingctx, value):
    """Sum of the lanes by the fixed tree."""

    def codegen(context, builder, sig, args):
        return builder.extract_element(_sum_lanes(builder, [args[0]])[0], ir.Constant(_I32, 0))

    return types.float32(vec16), codegen


@intrinsic
def lane_max(typingctx, value):
    """Largest lane; no lane may be NaN."""

    def codegen(context, builder, sig, args):
        best, half = args[0], LANES // 2
        while half:
            other = _shuffle(builder, best, best, [(lane + half) % LANES for lane in range(LANES)])
            best = builder.select(builder.fcmp_ordered(">", other, best), other, best)
            half //= 2
        return builder.extract_element(best, ir.Constant(_I32, 0))

    return types.float32(vec16), codegen


@intrinsic
def keep_lanes(typingctx, value, count, other):
    """Lanes [0, count) of `value`; `other` in the rest, whatever they held (NaN included)."""

    def codegen(context, builder, sig, args):
        lanes = ir.Constant(ir.VectorType(ir.IntType(64), LANES), list(range(LANES)))
        mask = builder.icmp_signed("<", lanes, _splat(builder, args[1]))
        return builder.select(mask, args[0], args[2])

    return vec16(vec16, types.int64, vec16), codegen


# ---------------------------------------------------- the same operations on a float32 and on lanes, with the same bits


def _elementwise(count, emit):
    """Intrinsic of `count` operands that are all float32 or all lanes; `emit(builder, *operands)` writes the code."""

    def codegen(context, builder, sig, args):
        return emit(builder, *args)

    def signature_of(operands):
        if len(set(operands)) == 1 and operands[0] in (types.float32, vec16):
            return operands[0](*operands), codegen
        return None

    if count == 1:
        return intrinsic(lambda typingctx, a: signature_of((a,)))
    if count == 2:
        return intrinsic(lambda typingctx, a, b: signature_of((a, b)))
    return intrinsic(lambda typingctx, a, b, c: signature_of((a, b, c)))


def _integer(builder, value):
    """The operand's bits as integers, and a maker of integer constants of the same shape."""
    shape = _IVEC if value.type == _VEC else _I32
    bits = builder.bitcast(value, shape)
    return bits, lambda n: ir.Constant(shape, [n] * LANES if shape == _IVEC else n)


def _emit_round_bf16(builder, value):
    bits, constant = _integer(builder, value)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    nearest = builder.and_(builder.add(bits, builder.add(odd, constant(0x7FFF))), constant(0xFFFF0000))
    quiet_nan = builder.and_(builder.or_(bits, constant(0x00400000)), constant(0xFFFF0000))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.bitcast(builder.select(is_nan, quiet_nan, nearest), value.type)


def _emit_power_of_two(builder, exponent):
    # adding 1.5 * 2**23 leaves the whole number in the low bits (a conversion would be undefined for NaN)
    magic = ir.Constant(exponent.type, [12582912.0] * LANES if exponent.type == _VEC else 12582912.0)
    bits, constant = _integer(builder, builder.fadd(exponent, magic))
    biased = builder.sub(bits, constant(0x4B400000 - 127))
    return builder.bitcast(builder.shl(biased, constant(23)), exponent.type)


fma = _elementwise(3, lambda builder, a, b, c: _call(builder, "fma", a, b, c))
nearest_integer = _elementwise(1, lambda builder, a: _call(builder, "rint", a))
square_root = _elementwise(1, lambda builder, a: _call(builder, "sqrt", a))
larger = _elementwise(2, lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))
smaller = _elementwise(2, lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b))
round_bf16 = _elementwise(1, _emit_round_bf16)
power_of_two = _elementwise(1, _emit_power_of_two)  # 2 ** n of a whole n in [-126, 127]


def _operator(function, emit):
    @type_callable(function)
    def type_operator(context):
        def typer(a, b):
            return vec16 if a == b == vec16 else None

        return typer

    @lower_builtin(function, vec16, vec16)
    def lower_operator(context, builder, sig, args):
        return emit(builder, *args)


_operator(operator.add, lambda builder, a, b: builder.fadd(a, b))
_operator(operator.sub, lambda builder, a, b: builder.fsub(a, b))
_operator(operator.mul, lambda builder, a, b: builder.fmul(a, b))
_operator(operator.truediv, lambda builder, a, b: builder.fdiv(a, b))


def constant_like(x, value):
    """`value` as a float32 or as lanes, whichever `x` is."""
    raise TypeError("only inside compiled code")


@overload(constant_like, inline="always")
def _constant_like(x, value):
    if x == vec16:
        return lambda x, value: splat(np.float32(value))
    return lambda x, value: np.float32(value)


# ------------------------------------------------------------------------------------------------- matrix-product tiles


@cache
def dot_tile(rows: int, columns: int, prefetch: bool):
    """Intrinsic for `rows` x `columns` products x[i + m] . w[j + n], written to out[p + m, q + n].

    `tile(x, i, w, j, out, p, q)` with x float32 [*, K], w bf16 bits [*, K], K a multiple of 16, out float32.
    Each product has one accumulator of 16 lanes that takes k in ascending order, 16 at a time, one fused multiply-add
    each, and then the fixed lane tree: the same bits for every tile shape. `prefetch` asks in order for the weights
    that follow the tile, which pays where the tile is the only reader of its weights.
    """

    @intrinsic
    def tile(typingctx, x, i, w, j, out, p, q):
        def codegen(context, builder, sig, args):
            x_array, w_array, out_array = (
                context.make_array(sig.args[n])(context, builder, args[n]) for n in (0, 2, 4)
            )
            depth = builder.extract_value(w_array.shape, 1)
            x_rows = [builder.add(args[1], ir.Constant(args[1].type, m)) for m in range(rows)]
            x_base = [builder.gep(x_array.data, [builder.mul(row, depth)], inbounds=True) for row in x_rows]
            w_rows = [builder.add(args[3], ir.Constant(args[3].type, n)) for n in range(columns)]
            w_base = [builder.gep(w_array.data, [builder.mul(row, depth)], inbounds=True) for row in w_rows]

            zero, step = ir.Constant(depth.type, 0), ir.Constant(depth.type, LANES)
            before, loop, after = builder.block, builder.append_basic_block("k"), builder.append_basic_block("sum")
            builder.cbranch(builder.icmp_signed(">", depth, zero), loop, after)
            builder.position_at_end(loop)
            k = builder.phi(depth.type)
            k.add_incoming(zero, before)
            sums = [[builder.phi(_VEC) for _ in range(columns)] for _ in range(rows)]
            w_lanes = [_load_lanes(builder, builder.gep(base, [k], inbounds=True), types.uint16) for base in w_base]
            x_lanes = [_load_lanes(builder, builder.gep(base, [k], inbounds=True), types.float32) for base in x_base]
            next_sums = [
                [_call(builder, "fma", x, w, sums[m][n]) for n, w in enumerate(w_lanes)] for m, x in enumerate(x_lanes)
            ]
            if prefetch:
                place = builder.mul(builder.add(k, depth), ir.Constant(depth.type, columns))
                for line in range(0, columns * LANES, WEIGHT_LINE):
                    far = builder.add(place, ir.Constant(depth.type, AHEAD + line))
                    _prefetch(builder, builder.gep(w_base[0], [far]))
            next_k = builder.add(k, step)
            k.add_incoming(next_k, loop)
            nothing = ir.Constant(_VEC, [0.0] * LANES)
            finals = []
            for m in range(rows):
                for n in range(columns):
                    sums[m][n].add_incoming(nothing, before)
                    sums[m][n].add_incoming(next_sums[m][n], loop)
            builder.cbranch(builder.icmp_signed("<", next_k, depth), loop, after)
            builder.position_at_end(after)
            for m in range(rows):
                for n in range(columns):
                    final = builder.phi(_VEC)
                    final.add_incoming(nothing, before)
                    final.add_incoming(next_sums[m][n], loop)
                    finals.append(final)

            packed = _sum_lanes(builder, finals)
            width = builder.extract_value(out_array.shape, 1)
            for m in range(rows):
                row = builder.add(args[5], ir.Constant(args[5].type, m))
                start = builder.gep(out_array.data, [builder.add(builder.mul(row, width), args[6])], inbounds=True)
                lanes = list(range(m * columns, (m + 1) * columns))
                _store_lanes(builder, _pick(builder, packed, lanes), start)
            return context.get_dummy_value()

        index = types.intp
        return types.void(x, index, w, index, out, index, index), codegen

    return tile


def _pick(builder: Any, packed: list[Any], lanes: list[int]) -> Any:
    """Neighbouring lanes of a list of 16-lane vectors as one short vector."""
    first = lanes[0] // LANES
    a = packed[first]
    b = packed[first + 1] if first + 1 < len(packed) else a
    return _shuffle(builder, a, b, [lane - first * LANES for lane in lanes])


@cache
def mix_tile(rows: int, vectors: int, fresh: bool):
    """Intrinsic for out[m, c] = (fresh ? 0 : out[m, c]) + sum over k of a[m, k] * b[k, c], `16 * vectors` columns.

    `tile(a, a_at, a_stride, b, b_at, count, out, out_at, out_stride)`: flat offsets and row strides in elements; b
    holds bf16 bits or float32, its rows `16 * vectors` apart. Each out element takes k in ascending order, one fused
    multiply-add each.
    """

    @intrinsic
    def tile(typingctx, a, a_at, a_stride, b, b_at, count, out, out_at, out_stride):
        def codegen(context, builder, sig, args):
            a_base, b_base, out_base = (
                _address(context, builder, sig.args[n], args[n], args[at]) for n, at in ((0, 1), (3, 4), (6, 7))
            )
            number = args[5].type

            def place(base, stride, m, extra):
                return builder.gep(
                    base, [builder.add(builder.mul(stride, ir.Constant(number, m)), extra)], inbounds=True
                )

            places = [
                [place(out_base, args[8], m, ir.Constant(number, LANES * c)) for c in range(vectors)]
                for m in range(rows)
            ]
            nothing = ir.Constant(_VEC, [0.0] * LANES)
            starts = [[nothing if fresh else _load_lanes(builder, at, types.float32) for at in row] for row in places]
            before, loop, after = builder.block, builder.append_basic_block("k"), builder.append_basic_block("done")
            builder.cbranch(builder.icmp_signed(">", args[5], ir.Constant(number, 0)), loop, after)
            builder.position_at_end(loop)
            k = builder.phi(number)
            sums = [[builder.phi(_VEC) for _ in range(vectors)] for _ in range(rows)]
            b_row = builder.mul(k, ir.Constant(number, LANES * vectors))
            lanes = [
                _load_lanes(
                    builder,
                    builder.gep(b_base, [builder.add(b_row, ir.Constant(number, LANES * c))], inbounds=True),
                    sig.args[3].dtype,
                )
                for c in range(vectors)
            ]
            after_sums = []
            for m in range(rows):
                factor = _splat(builder, builder.load(place(a_base, args[2], m, k)))
                after_sums.append([_call(builder, "fma", factor, lanes[c], sums[m][c]) for c in range(vectors)])
            next_k = builder.add(k, ir.Constant(number, 1))
            k.add_incoming(ir.Constant(number, 0), before)
            k.add_incoming(next_k, loop)
            for m in range(rows):
                for c in range(vectors):
                    sums[m][c].add_incoming(starts[m][c], before)
                    sums[m][c].add_incoming(after_sums[m][c], loop)
            builder.cbranch(builder.icmp_signed("<", next_k, args[5]), loop, after)
            builder.position_at_end(after)
            for m in range(rows):
                for c in range(vectors):
                    final = builder.phi(_VEC)
                    final.add_incoming(starts[m][c], before)
                    final.add_incoming(after_sums[m][c], loop)
                    places[m][c] = (final, places[m][c])
            for row in places:
                for final, at in row:
                    _store_lanes(builder, final, at)
            return context.get_dummy_value()

        n = types.intp
        return types.void(a, n, n, b, n, n, out, n, n), codegen

    return tile
