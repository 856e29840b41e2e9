"""Numba kernels for the LFM2 family: one file an operation, one backend a device. Knows nothing of any server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _OwnModules:
    """Finds this package's modules before numba-cuda's import hook does: that one takes every module whose name holds
    "numba.cuda", `kernels_numba.cuda` too, and recurses without end."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, path, target) if name.startswith(f"{__name__}.") else None


if _OwnModules not in sys.meta_path:
    sys.meta_path.insert(0, _OwnModules)  # type: ignore[arg-type]
