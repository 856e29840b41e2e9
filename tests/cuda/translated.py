"""Kernels as coroutines: a function of a kernel in plain Python, which stops wherever its CUDA thread waits for others.

A function that waits somewhere becomes a generator, and whoever calls it one as well (`yield from`); the rest stay
functions. Numbers are Python's: `u32(x)` becomes `x & 0xFFFFFFFF` where it stands, float32 rounds in the operations.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

BITS: dict[Any, tuple[int, bool]] = {
    np.uint8: (8, False), np.uint16: (16, False), np.uint32: (32, False), np.uint64: (64, False),
    np.int8: (8, True), np.int16: (16, True), np.int32: (32, True), np.int64: (64, True),
}  # fmt: skip

_word = memoryview(bytearray(4))
_bits, _float = _word.cast("I"), _word.cast("f")


def single(x: float) -> float:
    """x rounded to float32."""
    _float[0] = x
    return _float[0]


def bits_of(x: float) -> int:
    _float[0] = x
    return _bits[0]


def float_of(bits: int) -> float:
    _bits[0] = bits
    return _float[0]


NUMPY = SimpleNamespace(float32=single, float64=float, **{kind.__name__: kind for kind in BITS})


def plain(value: Any) -> Any:
    """NumPy's numbers and arrays as things that are, and hold, Python's; anything else as it is."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return memoryview(value)
    return tuple(plain(part) for part in value) if isinstance(value, tuple) else value


class _Rewriter(ast.NodeTransformer):
    """Puts `yield from` before calls that wait and casts where they are called."""

    def __init__(self, scope: dict[str, Any], names: tuple[str, ...]) -> None:
        self.scope, self.names = scope, names

    def called(self, node: ast.expr) -> Any:
        """What a call calls, or None where a name is a local variable's."""
        if isinstance(node, ast.Attribute):
            return getattr(self.called(node.value), node.attr)
        assert isinstance(node, ast.Name), ast.unparse(node)
        assert node.id in self.names, f"{node.id} is called but not a global name"
        return self.scope[node.id] if node.id in self.scope else getattr(builtins, node.id)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        function = self.called(node.func)
        if isinstance(function, type) and function in BITS:
            (value,) = node.args
            return _cast(value, *BITS[function])
        return ast.YieldFrom(node) if inspect.isgeneratorfunction(function) else node


def _cast(value: ast.expr, bits: int, signed: bool) -> ast.expr:
    """`value` as an integer of that many bits."""
    mask, half = ast.Constant((1 << bits) - 1), ast.Constant(1 << bits - 1)
    if not signed:
        return ast.BinOp(value, ast.BitAnd(), mask)
    return ast.BinOp(ast.BinOp(ast.BinOp(value, ast.Add(), half), ast.BitAnd(), mask), ast.Sub(), half)


class Translator:
    """operations: the Python twin of each intrinsic, by the intrinsic's id; cuda: what stands for Numba's module."""

    def __init__(self, operations: dict[int, Any], cuda: Any) -> None:
        self._operations, self._cuda = operations, cuda
        self._made: dict[int, tuple[Any, Any]] = {}

    def __call__(self, thing: Any) -> Any:
        """What takes the place of a kernel, of one of its functions, or of what its names stand for."""
        if id(thing) in self._operations:
            return self._operations[id(thing)]
        if isinstance(thing, np.generic | np.ndarray | tuple):
            return plain(thing)
        if thing is np.float32:
            return single
        if thing is np:
            return NUMPY
        if id(thing) not in self._made:
            function = getattr(thing, "py_func", thing)
            mine = isinstance(function, FunctionType) and function.__module__.startswith(("kernels_numba", "<unrolled"))
            self._made[id(thing)] = (self._function(function) if mine else thing, thing)  # the thing, so its id stays
        return self._made[id(thing)][0]

    def _function(self, function: FunctionType) -> Callable[..., Any]:
        names = function.__code__.co_names
        scope = dict(function.__globals__)
        for name in names:
            if name in scope:
                scope[name] = self._cuda if name == "cuda" else self(scope[name])
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        (definition,) = tree.body
        assert isinstance(definition, ast.FunctionDef)
        definition.decorator_list = []
        for argument in definition.args.args:
            argument.annotation = None
        _Rewriter(scope, names).visit(definition)
        exec(compile(ast.fix_missing_locations(tree), f"<translated {function.__qualname__}>", "exec"), scope)
        made: Callable[..., Any] = scope[definition.name]
        return made
