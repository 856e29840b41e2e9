"""How kernels are compiled: `kernel` is called from Python and cached on disk, `device` is called from kernels only.

Numba keys its on-disk cache on the file that defines a function. A kernel here is built from several files, so the
stamp of its cache entry is a digest of every source file of its folder and of this one (and of llvmlite's version;
numba's version and the CPU are already part of numba's key). Entries live where numba puts them: NUMBA_CACHE_DIR if
set, else the folder's `__pycache__`, else the user's cache directory.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile

_log = logging.getLogger(__name__)


@cache
def source_stamp(folder: Path) -> str:
    """Digest of the sources in `folder` and beside this file, and of the versions of numba and llvmlite."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in sorted({*Path(__file__).parent.glob("*.py"), *folder.glob("*.py")}):
        digest.update(f"\n{path.parent.name}/{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()


class _CacheFile(IndexDataCacheFile):  # type: ignore[misc]
    """Names a data file by its key and stamps it, so that processes compiling at the same time can't mix entries up."""

    def save(self, key: Any, data: Any) -> None:
        name = self._data_name(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:6], "big"))
        self._save_data(name, (self._source_stamp, key, data))
        self._save_index({**self._load_index(), key: name})

    def load(self, key: Any) -> Any:
        entry = super().load(key)
        return entry[2] if entry is not None and entry[:2] == (self._source_stamp, key) else None


class _PackageCache(FunctionCache):  # type: ignore[misc]
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = source_stamp(Path(inspect.getfile(function)).parent)
        self._cache_file = _CacheFile(self._cache_path, self._impl.filename_base, stamp)


_OPTIONS = {"nogil": True, "error_model": "numpy"}


def device(function: Callable[..., Any]) -> Any:
    """Compile a function that only kernels call; it is part of their cache entries."""
    return numba.njit(**_OPTIONS)(function)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls, one specialisation per set of argument types, cached on disk."""
    dispatcher = numba.njit(**_OPTIONS)(function)
    try:
        dispatcher._cache = _PackageCache(function)
    except RuntimeError as error:  # numba's answer when no cache directory is writable
        _log.warning("compiled kernels are not kept: %s", error)
    return dispatcher
