"""Kernel calls that are collected and then made as one, so that nobody waits for the interpreter between them.

A kernel gives Python's lock back while it runs. Where other threads want that lock, each of a decode round's hundred
calls can wait for it, and each such wait costs more than most of these kernels take.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from llvmlite import ir
from numba import typeof, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from ..jit import kernel
from .team import BUSY, Team, call_task, team, word

WORDS = 1 << 16  # for the arguments of waiting calls: a matrix takes nine
MOST_BYTES = 16 << 20  # of results that wait to be computed; before there are more, the calls are made

_I64 = ir.IntType(64)
_HEAD = 3  # words before a call's arguments: the stub's address, the kernel's, and where the next call begins


def _bare(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """A value that owns nothing: its arrays are kept by the caller until the call is made."""
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value=value)
        array.meminfo = cgutils.get_null_value(array.meminfo.type)
        array.parent = cgutils.get_null_value(array.parent.type)
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        parts = [_bare(context, builder, k, v) for k, v in zip(kind, cgutils.unpack_tuple(builder, value), strict=True)]
        return context.make_tuple(builder, kind, parts)
    return value


@intrinsic
def _put(typingctx, words, at, arguments):
    """Write the arguments of a call behind its head, and the address of a stub that makes it; where the next begins,
    or -1 where there is no room."""

    def codegen(context, builder, sig, args):
        kind = sig.args[2]
        shape = context.get_value_type(kind)
        size = _HEAD + -(-context.get_abi_sizeof(shape) // 8)

        restype, argtypes = types.void, (types.intp, types.intp)  # a task's, see `team`
        stub = ir.Function(
            builder.module,
            context.call_conv.get_function_type(restype, argtypes),
            builder.module.get_unique_name("stub"),
        )
        stub.linkage = "internal"
        inner = ir.IRBuilder(stub.append_basic_block("entry"))
        place, address = context.call_conv.get_arguments(stub)
        packed = inner.load(inner.inttoptr(place, shape.as_pointer()))
        called = inner.inttoptr(address, context.call_conv.get_function_type(types.none, kind.types).as_pointer())
        status, _ = context.call_conv.call_function(
            inner, called, types.none, kind.types, cgutils.unpack_tuple(inner, packed)
        )
        with cgutils.if_unlikely(inner, status.is_error):
            context.call_conv.return_status_propagate(inner, status)
        context.call_conv.return_value(inner, context.get_dummy_value())

        array = context.make_array(sig.args[0])(context, builder, args[0])
        end = builder.add(args[1], ir.Constant(_I64, size))
        fits = builder.icmp_signed("<=", end, builder.extract_value(array.shape, 0))
        with builder.if_then(fits):
            here = word(context, builder, sig, args)
            builder.store(builder.ptrtoint(stub, _I64), here)
            builder.store(end, builder.gep(here, [ir.Constant(_I64, 2)]))
            room = builder.bitcast(builder.gep(here, [ir.Constant(_I64, _HEAD)]), shape.as_pointer())
            builder.store(_bare(context, builder, kind, args[2]), room)
        return builder.select(fits, end, ir.Constant(_I64, -1))

    return types.intp(words, at, arguments), codegen


@kernel
def _put_call(words, at, *arguments):
    return _put(words, at, arguments)


@kernel
def _make_calls(words, place, end):
    at = 0
    while at < end:
        if call_task(words[at], place + 8 * (at + _HEAD), words[at + 1]):
            raise MemoryError("a kernel found no memory for its scratch")
        at = words[at + 2]


_lock = threading.RLock()  # one kernel at a time in the process: a team has one caller


def alone() -> threading.RLock:
    """Held by who uses scratch that calls share."""
    return _lock


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows, which can't fork
    os.register_at_fork(after_in_child=_new_lock)


class Calls:
    """Makes a backend's kernel calls: each at once, or, for the thread inside `together`, all of them later."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._collector = 0  # the thread whose calls wait
        self._words = np.zeros(WORDS, np.int64)
        self._place = self._words.ctypes.data
        self._end = 0
        self._kept: list[Any] = []  # what the calls read and write
        self._bytes = 0  # of results that wait
        self._wakes = False  # one of the calls has parts for the team
        self._kernels: dict[tuple[Any, int], int] = {}  # address of a kernel by the stub that calls it

    @property
    def team(self) -> Team:
        return team(self._threads)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Have this thread's calls wait; they are made at `settle` and behind the block."""
        if self._collector:
            yield
            return
        self._collector, busy = threading.get_ident(), self.team.state
        busy[BUSY] = 1
        try:
            yield
            self.settle()
        finally:
            busy[BUSY] = 0
            self._collector, self._end, self._wakes = 0, 0, False
            self._kept.clear()

    def __call__(self, kernel: Any, *arguments: Any) -> None:
        """kernel(*arguments), now or with the others."""
        if self._collector != threading.get_ident():
            with _lock:
                kernel(*arguments)
        elif not self._add(kernel, arguments):
            self.settle()
            self._add(kernel, arguments)

    def empty(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """An array for a result."""
        out = np.empty(shape, np.float32)
        if self._collector == threading.get_ident():
            self._bytes += out.nbytes
            if self._bytes > MOST_BYTES:
                self.settle()
        return out

    def wake(self) -> None:
        """Wake the team for a call that will have parts for it."""
        if self._collector == threading.get_ident():
            self._wakes = True
        else:
            self.team.wake()

    def settle(self) -> None:
        """Make the calls that wait. MemoryError: one of them found none; those behind it weren't made."""
        if self._collector != threading.get_ident() or not self._kept:
            return
        end, self._end, self._bytes = self._end, 0, 0
        kept, self._kept = self._kept, []
        if self._wakes:
            self._wakes = False
            self.team.wake()
        with _lock:
            _make_calls(self._words, self._place, end)
        kept.clear()

    def _add(self, kernel: Any, arguments: tuple[Any, ...]) -> bool:
        """False: there is no room for a call more."""
        at = self._end
        end = _put_call(self._words, at, *arguments)
        if end < 0:
            return False
        stub = int(self._words[at])  # one for each list of types
        address = self._kernels.get((kernel, stub))
        if address is None:
            address = self._kernels[kernel, stub] = _address(kernel, arguments)
        self._words[at + 1] = address
        self._end = end
        self._kept.append(arguments)
        return True


def _address(kernel: Any, arguments: tuple[Any, ...]) -> int:
    """Of the kernel as it is compiled for these arguments."""
    kinds = tuple(map(typeof, arguments))
    kernel.compile(kinds)
    made = kernel.overloads[kinds]
    address: int = made.library.get_pointer_to_function(made.fndesc.llvm_func_name)
    return address
