"""Compile kernels into the disk cache: `python -m kernels_numba.cuda.build sm_90a NAME...`; see compiler.prepare."""

from __future__ import annotations

import sys

from . import CudaBackend, random_weights  # noqa: F401  (these register every kernel)
from .compiler import KERNELS


def main() -> None:
    architecture, *names = sys.argv[1:]
    for name in names:
        KERNELS[name].cubin(architecture)


if __name__ == "__main__":
    main()
