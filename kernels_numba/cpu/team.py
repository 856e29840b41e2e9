"""Fork and join for kernels: `spread` runs a compiled function once per part on a team of threads.

Parts are taken from a shared counter, so a helper that the system doesn't schedule costs nothing: the caller does its
parts. Helpers spin for a moment after their last part (a decode round is a hundred short regions) and then sleep.
Unlike OpenMP this survives a fork and needs no library; unlike Numba's own pool it takes about a microsecond.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import typeof, types
from numba.core import cgutils
from numba.extending import intrinsic

from ..jit import device, kernel

# Words of a team's state, each on a cache line of its own.
LINE = 8
TICKET = 0  # generation << 32 | parts << 16 | next part to hand out
DONE = 1 * LINE  # parts finished in this generation
TASK = 2 * LINE  # address of the function and of its arguments, written before the ticket
ARGUMENTS = 2 * LINE + 1
FAILED = 3 * LINE
BUSY = 4 * LINE  # more work is to come: no helper that is awake falls asleep
WORDS = 5 * LINE

PART_BITS = 16
PART_MASK = (1 << PART_BITS) - 1
GENERATION_BITS = 2 * PART_BITS
IDLE_SPINS = 20_000  # some hundred microseconds
WAIT_SPINS = 2_000  # then let another thread have the core: it may be the one we wait for

_I64 = ir.IntType(64)


def word(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    data = context.make_array(sig.args[0])(context, builder, args[0]).data
    return builder.gep(data, [args[1]], inbounds=True)


@intrinsic
def read(typingctx, words, index):
    """Atomic load; what its writer wrote before is visible."""

    def codegen(context, builder, sig, args):
        return builder.load_atomic(word(context, builder, sig, args), "acquire", 8)

    return types.int64(words, types.int64), codegen


@intrinsic
def write(typingctx, words, index, value):
    """Atomic store that publishes everything written before it."""

    def codegen(context, builder, sig, args):
        builder.store_atomic(args[2], word(context, builder, sig, args), "release", 8)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64), codegen


@intrinsic
def swap_if(typingctx, words, index, expected, value):
    """Atomic: write `value` if the word is `expected`; says whether it was."""

    def codegen(context, builder, sig, args):
        pair = builder.cmpxchg(word(context, builder, sig, args), args[2], args[3], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(words, types.int64, types.int64, types.int64), codegen


@intrinsic
def count_up(typingctx, words, index):
    """Atomic += 1."""

    def codegen(context, builder, sig, args):
        builder.atomic_rmw("add", word(context, builder, sig, args), ir.Constant(_I64, 1), "acq_rel")
        return context.get_dummy_value()

    return types.void(words, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Tell an x86 core that this is a waiting loop; nothing elsewhere."""

    def codegen(context, builder, sig, args):
        if builder.module.triple.startswith(("x86_64", "i686", "amd64")):
            nothing = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, nothing, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen


yield_core = types.ExternalFunction("sched_yield", types.int32()) if hasattr(os, "sched_yield") else pause


def _task_signature() -> tuple[Any, tuple[Any, ...]]:
    return types.void, (types.intp, types.intp)


@intrinsic
def address_of(typingctx, arguments):
    """Address of a copy of `arguments` on the caller's stack."""

    def codegen(context, builder, sig, args):
        place = cgutils.alloca_once_value(builder, args[0])
        return builder.ptrtoint(place, _I64)

    return types.intp(arguments), codegen


@intrinsic
def call_task(typingctx, task, arguments, part):
    """Run one part; says whether it raised (out of memory is all that a part can raise)."""

    def codegen(context, builder, sig, args):
        restype, argtypes = _task_signature()
        function_type = context.call_conv.get_function_type(restype, argtypes)
        function = builder.inttoptr(args[0], function_type.as_pointer())
        places = [cgutils.alloca_once(builder, kind.pointee) for kind in function_type.args[:2]]
        status = builder.call(function, [*places, args[1], args[2]])
        return builder.icmp_signed(">", status, ir.Constant(status.type, 0))

    return types.boolean(types.intp, types.intp, types.intp), codegen


@device
def take_part(state):
    """Run the next part if there is one. An unchanged ticket proves that the task read meanwhile is of its time."""
    ticket = read(state, TICKET)
    part = ticket & PART_MASK
    if part >= (ticket >> PART_BITS) & PART_MASK:
        return False
    task, arguments = read(state, TASK), read(state, ARGUMENTS)
    if swap_if(state, TICKET, ticket, ticket + 1):
        if call_task(task, arguments, part):
            write(state, FAILED, 1)
        count_up(state, DONE)
    return True


@device
def run_parts(state, parts, task, arguments):
    """Have every part run once, here and by the helpers that are awake."""
    write(state, DONE, 0)
    write(state, TASK, task)
    write(state, ARGUMENTS, arguments)
    generation = (read(state, TICKET) >> GENERATION_BITS) + 1
    write(state, TICKET, generation << GENERATION_BITS | parts << PART_BITS)
    while take_part(state):
        pass
    spins = 0
    while read(state, DONE) < parts:
        spins += 1
        if spins < WAIT_SPINS:
            pause()
        else:
            yield_core()
    if read(state, FAILED):
        write(state, FAILED, 0)
        raise MemoryError("a kernel found no memory for its scratch")


def spread(body: Any) -> Any:
    """Device function `run(state, parts, arguments)`: calls `body(part, parts, *arguments)` for every part in
    [0, parts), parts < 2**16, in any order and on any thread."""

    @intrinsic
    def task_of(typingctx, arguments):
        """Address of a function `task(address of arguments, part)` that calls the body."""
        body_type = typeof(body)
        signature = typingctx.resolve_function_type(body_type, (types.intp, *arguments.types), {})

        def codegen(context, builder, sig, args):
            restype, argtypes = _task_signature()
            function_type = context.call_conv.get_function_type(restype, argtypes)
            function = ir.Function(builder.module, function_type, builder.module.get_unique_name("task"))
            function.linkage = "internal"
            inner = ir.IRBuilder(function.append_basic_block("entry"))
            address, part = context.call_conv.get_arguments(function)
            packed = inner.load(inner.inttoptr(address, context.get_value_type(sig.args[0]).as_pointer()))
            implementation = context.get_function(body_type, signature)
            for library in getattr(implementation, "libs", ()):
                context.active_code_library.add_linking_library(library)
            implementation(inner, [part, *cgutils.unpack_tuple(inner, packed)])
            context.call_conv.return_value(inner, context.get_dummy_value())
            return builder.ptrtoint(function, _I64)

        return types.intp(arguments), codegen

    @device
    def run(state, parts, arguments):
        task, place = task_of((parts, *arguments)), address_of((parts, *arguments))
        if parts == 1:
            if call_task(task, place, 0):
                raise MemoryError("a kernel found no memory for its scratch")
        else:
            run_parts(state, parts, task, place)

    return run


@kernel
def help_out(state):
    """A helper's life while there is work: returns after IDLE_SPINS looks that found none."""
    idle = 0
    while idle < IDLE_SPINS:
        if take_part(state):
            idle = 0
        else:
            idle += 1 - read(state, BUSY)
            pause()


class Team:
    """The calling thread and `threads - 1` helpers. Only one thread at a time may call kernels with its `state`."""

    def __init__(self, threads: int) -> None:
        self.state = np.zeros(WORDS, np.int64)
        self._asleep: list[Any] = []
        for number in range(1, threads):
            alarm = threading.Lock()
            alarm.acquire()
            threading.Thread(target=self._help, args=(alarm,), name=f"kernel helper {number}", daemon=True).start()

    def _help(self, alarm: Any) -> None:
        while True:
            if not self.state[BUSY]:
                self._asleep.append(alarm)
                alarm.acquire()
            help_out(self.state)

    def wake(self) -> None:
        """Call before a kernel that spreads parts; a helper that falls asleep just then only leaves its parts to us."""
        while self._asleep:
            self._asleep.pop().release()


@cache
def team(threads: int) -> Team:
    """The process's team of that size."""
    return Team(threads)


if hasattr(os, "register_at_fork"):  # not on Windows, which can't fork
    os.register_at_fork(after_in_child=team.cache_clear)  # the child has none of the helpers
