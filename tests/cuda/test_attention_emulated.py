"""Attention of few rows without a GPU: one kernel from the q/k/v product to partial results against two."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba.cuda.compiler import Kernel

from . import attention_operations
from .emulator import Emulator, Index


class Attention(Emulator):
    """With the grid's second dimension, one row of blocks after another."""

    row = 0

    def _cuda(self) -> Any:
        made = super()._cuda()
        made.blockIdx = Index(x=lambda: self._here.now.index, y=lambda: self.row)
        return made

    def run(self, kernel: Kernel, grid: tuple[int, int], threads: int, *arguments: Any, shared: int = 0) -> None:
        """As `operations` asks for: arrays where the kernel takes an address are put into memory and read back."""
        given, back = [], []
        for kind, value in zip(kernel.arguments, arguments, strict=True):
            if kind == "u64" and isinstance(value, np.ndarray):
                address = self.memory.put(value)
                back.append((address, value))
                value = np.uint64(address)
            given.append(value)
        for self.row in range(grid[1]):
            self.launch(kernel.function, grid[0], threads, given)
        for address, array in back:
            array[...] = self.memory.get(address, array.shape, array.dtype)


def test_one_kernel_leaves_the_bits_of_two() -> None:
    emulator = Attention(1 << 24)
    rng = np.random.default_rng(3)
    attention_operations.check_attention_decode(emulator.run, rng, 2, 1, [(0, 126, 3), (2, 130, 1)], 3)
