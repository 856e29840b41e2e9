"""Kernels and how they become machine code: Numba writes PTX, nvJitLink assembles it; neither needs a GPU.

A kernel is registered with the types of its arguments, so all of them compile the same way, here and in the contract:

    @kernel("bf16* f32* i32", threads=256)
    def scale(x, factor, n): ...

Machine code is cached on disk under a digest of the package's sources, the compiler's releases and the architecture.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..jit import source_stamp

_log = logging.getLogger(__name__)

ARCHITECTURES = {"sm_80": (8, 0), "sm_89": (8, 9), "sm_90a": (9, 0, "a"), "sm_100": (10, 0), "sm_120": (12, 0)}
"""What every release is checked for; "a" is Hopper's own instruction set."""

HOPPER = ("sm_90a",)
BULK = ("sm_90a", "sm_100", "sm_120")
"""Those with bulk copies, mbarriers and programmatic dependent launch."""


class CompileError(RuntimeError):
    """A kernel did not compile; says which, for what, and the compiler's words."""


@dataclass(frozen=True)
class Usage:
    """What one block of a kernel takes on an architecture, as the assembler reports it."""

    registers: int
    stack: int
    """bytes a thread"""
    spills: int
    """bytes stored plus bytes loaded"""
    shared: int
    """bytes fixed at compile time, plus the most that a launch asks for"""


@dataclass(eq=False)
class Kernel:
    """A device entry point; `launch` it through driver.py."""

    name: str
    function: Callable[..., None]
    arguments: tuple[str, ...]
    threads: int
    """most threads of a block, which bounds the registers"""
    blocks: int
    """blocks that a multiprocessor must be able to hold at once"""
    dynamic_shared: int
    """most bytes of dynamic shared memory a launch asks for"""
    architectures: tuple[str, ...]
    _library: Any = field(default=None, repr=False)

    def ptx(self, architecture: str) -> str:
        """PTX for an architecture; the entry point bears the kernel's name."""
        with _without_device(architecture):
            if self._library is None:
                self._library = _front_end(self)
            text = self._library.get_asm_strs(cc=_capability(architecture))[0]
        entry = re.search(r"\.entry\s+(\w+)", text)
        if entry is None:
            raise CompileError(f"kernel {self.name} for {architecture}: no entry point in its PTX")
        text = text.replace(entry[1], self.name)
        if _capability(architecture)[:2] < (9, 0):  # programmatic dependent launch begins with Hopper
            text = re.sub(r"griddepcontrol\.\w+;", "", text)
        return text

    def compile(self, architecture: str) -> tuple[bytes, Usage]:
        """Machine code (a cubin) and what it takes; not cached."""
        cubin, report = _assemble(self.name, self.ptx(architecture), architecture)
        return cubin, _usage(self, report)

    def cached(self, architecture: str) -> Path:
        """Where the disk cache keeps its machine code."""
        return _cache_directory() / f"{self.name}-{architecture}-{_stamp()}.cubin"

    def cubin(self, architecture: str) -> bytes:
        """Machine code from the cache on disk, compiled if it isn't there."""
        path = self.cached(architecture)
        try:
            return path.read_bytes()
        except FileNotFoundError:
            pass
        code, _ = self.compile(architecture)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(code)
            os.replace(temporary, path)
        except OSError as error:
            _log.warning("compiled kernel %s is not kept: %s", self.name, error)
        return code


KERNELS: dict[str, Kernel] = {}
"""Every registered kernel by name."""


def kernel(
    arguments: str,
    *,
    threads: int,
    blocks: int = 1,
    dynamic_shared: int = 0,
    architectures: tuple[str, ...] = tuple(ARCHITECTURES),
    name: str | None = None,
) -> Callable[[Callable[..., None]], Kernel]:
    """Register a function as a kernel.

    `arguments` names their types in order: u64 (an address), i64, u32, i32, f32, or a typed pointer that the kernel
    indexes: bf16* (uint16 bits), f32*, i32*, u32*, i64*, u64*, u8*.
    """

    def decorate(function: Callable[..., None]) -> Kernel:
        made = Kernel(
            name or function.__name__,
            function,
            tuple(arguments.split()),
            threads,
            blocks,
            dynamic_shared,
            architectures,
        )
        if made.name in KERNELS:
            raise ValueError(f"two kernels are named {made.name}")
        KERNELS[made.name] = made
        return made

    return decorate


def prepare(kernels: Iterable[Kernel], architecture: str) -> None:
    """Compile those kernels that the disk cache lacks, in as many processes as there are cores."""
    missing = [made.name for made in kernels if not made.cached(architecture).exists()]
    workers = min(len(missing), os.cpu_count() or 1)
    if not workers:
        return
    _log.info("compiling %d kernels for %s; they are kept for later starts", len(missing), architecture)
    package = Path(__file__).parents[1]
    paths = os.pathsep.join([str(package.parent), *filter(None, sys.path)])
    shares = [missing[first::workers] for first in range(workers)]
    # not multiprocessing, which would run a caller's script again
    running = [
        subprocess.Popen(
            [sys.executable, "-m", f"{package.name}.cuda.build", architecture, *share],
            env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for share in shares
    ]  # fmt: skip
    said = [process.communicate()[1] for process in running]
    for share, process, words in zip(shares, running, said, strict=True):
        if process.returncode:
            last = words.strip().rpartition("\n")[2] or f"exit code {process.returncode}"
            raise CompileError(f"kernels {', '.join(share)} for {architecture}: {last}")


def architecture_of(capability: tuple[int, int]) -> str:
    """The architecture whose machine code a GPU of that compute capability runs best."""
    major, minor = capability
    return f"sm_{major}{minor}a" if capability == (9, 0) else f"sm_{major}{minor}"


def compiler_release() -> str:
    """Releases of the two compilers, as the contract records them."""
    return f"numba-cuda {version('numba-cuda')}, nvjitlink {_nvjitlink_release()}"


@cache
def _stamp() -> str:
    return hashlib.sha256(f"{source_stamp(Path(__file__).parent)} {compiler_release()}".encode()).hexdigest()[:20]


@cache
def _nvjitlink_release() -> str:
    from cuda.bindings import nvjitlink

    major, minor = nvjitlink.version()
    return f"{major}.{minor}"


@cache
def _cache_directory() -> Path:
    chosen = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    return (Path(chosen) if chosen else Path.home() / ".cache") / "kernels_numba"


def _capability(architecture: str) -> tuple[Any, ...]:
    digits, special = re.fullmatch(r"sm_(\d+)(a?)", architecture).groups()  # type: ignore[union-attr]
    return (int(digits[:-1]), int(digits[-1]), special) if special else (int(digits[:-1]), int(digits[-1]))


class _without_device:
    """Numba asks the current GPU for its capability when it compiles a device function; answer for it."""

    def __init__(self, architecture: str) -> None:
        self._answer = SimpleNamespace(compute_capability=_capability(architecture)[:2])

    def __enter__(self) -> None:
        from numba.cuda import dispatcher

        self._asked = dispatcher.get_current_device
        dispatcher.get_current_device = lambda: self._answer

    def __exit__(self, *_: object) -> None:
        from numba.cuda import dispatcher

        dispatcher.get_current_device = self._asked


def _front_end(made: Kernel) -> Any:
    """Types and lowers a kernel once; NVVM then makes PTX of it for each architecture."""
    from numba.cuda import compiler, types

    scalars = {
        "u64": types.uint64, "i64": types.int64, "u32": types.uint32, "i32": types.int32, "f32": types.float32,
        "bf16": types.uint16, "u8": types.uint8,
    }  # fmt: skip
    signature = tuple(types.CPointer(scalars[a[:-1]]) if a.endswith("*") else scalars[a] for a in made.arguments)
    library, _ = compiler._compile_pyfunc_with_fixup(
        made.function, signature, device=False, abi="numba", cc=(9, 0), launch_bounds=(made.threads, made.blocks)
    )
    return library


def _assemble(name: str, ptx: str, architecture: str) -> tuple[bytes, str]:
    from cuda.bindings import nvjitlink

    options = [f"-arch={architecture}", "-verbose"]
    text = ptx.encode()
    handle = nvjitlink.create(len(options), options)
    try:
        try:
            nvjitlink.add_data(handle, nvjitlink.InputType.PTX, text, len(text), name)
            nvjitlink.complete(handle)
        except nvjitlink.nvJitLinkError as error:
            log = bytearray(nvjitlink.get_error_log_size(handle))
            nvjitlink.get_error_log(handle, log)
            said = bytes(log).decode().strip("\0\n ")
            raise CompileError(f"kernel {name} for {architecture}: {said}") from error
        code = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, code)
        log = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, log)
        return bytes(code), bytes(log).decode()
    finally:
        nvjitlink.destroy(handle)


def _usage(made: Kernel, report: str) -> Usage:
    registers = re.search(r"Used (\d+) registers", report)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    if registers is None or frame is None:
        raise CompileError(f"kernel {made.name}: no resource usage in the assembler's report: {report!r}")
    shared = re.findall(r"(\d+) bytes smem", report)
    return Usage(
        registers=int(registers[1]),
        stack=int(frame[1]),
        spills=int(frame[2]) + int(frame[3]),
        shared=(int(shared[-1]) if shared else 0) + made.dynamic_shared,
    )
