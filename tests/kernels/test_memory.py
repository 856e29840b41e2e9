"""Large memory: zeroed, aligned, each array its own, and still there when only a view is left."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from kernels_numba.cpu.memory import HUGE_PAGE, LINE, Arena, mapped


@pytest.mark.parametrize("nbytes", [0, 1, 4096, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_mapped_memory_is_zeroed_and_writable(nbytes: int) -> None:
    memory = mapped(nbytes)
    assert memory.shape == (nbytes,) and not memory.any()
    memory[:] = 7
    kept = memory[nbytes // 2 :]
    del memory
    gc.collect()
    assert (kept == 7).all()
    if nbytes >= HUGE_PAGE:
        assert kept.base is not None


def test_arena_arrays_do_not_overlap_and_outlive_it() -> None:
    arena = Arena(3 * HUGE_PAGE)
    shapes = [(5, 16), (700, 1024), (1,), (3, 64, 16), (1000, 1024), (4096, 1024)]  # the last two don't fit
    arrays = [arena.take(shape, np.uint16) for shape in shapes]
    for i, array in enumerate(arrays):
        array[...] = i
    del arena
    gc.collect()
    for i, (array, shape) in enumerate(zip(arrays, shapes, strict=True)):
        assert array.shape == shape and array.flags.c_contiguous and array.flags.writeable
        assert array.ctypes.data % LINE == 0
        assert (array == i).all()
