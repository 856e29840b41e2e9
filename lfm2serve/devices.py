"""Where a model runs: the device that was asked for, what it has, and its backend."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from lfm2serve.backend import Backend
from lfm2serve.config import ModelConfig
from lfm2serve.errors import DeviceError
from lfm2serve.options import EngineOptions

log = logging.getLogger("lfm2serve.devices")

GIB = 1 << 30
CPU_STATES_BYTES = 2 * GIB  # pages and kept states together, unless a limit is set
GPU_RESERVE_BYTES = GIB  # unless set: for whoever else needs a little
GPU_KERNEL_BYTES = 128 << 20  # loaded kernels, their stacks, what the driver takes for itself
GRAPH_BYTES = 8 << 20  # of a decode round's size
CPU_CHUNK = 512  # rows of a prompt step: past that a product gains nothing
GPU_CHUNK = 16384  # past 10,000 rows a step reads all experts for enough rows each
LOGIT_ROWS = 64
ATTENTION_RANGE = 128


@dataclass(frozen=True, slots=True)
class Target:
    """A device to plan for. memory: bytes that are free; states_bytes: of pages and kept states together where the
    user sets no limit (None: whatever is left); chunk: most rows of a prompt step; virtual_memory: whether the page
    pool can be mapped piece by piece."""

    kind: str
    name: str
    memory: int
    states_bytes: int | None
    chunk: int
    gpu: int = 0
    virtual_memory: bool = False


def find_device(options: EngineOptions) -> Target:
    """The device that `options` ask for; "auto" is the GPU where one can be used, and the log says why one can't.

    DeviceError: no driver, no such GPU, one below compute capability 8.0, or one that kernels can't be compiled for.
    """
    if options.device == "cuda":
        return _find_gpu(options)
    if options.device == "auto" and options.dtype != "float32":
        from kernels_numba.cuda.driver import device_count

        try:
            if device_count():
                return _find_gpu(options)
        except DeviceError as error:
            log.warning("running on the CPU: %s", error)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Target("cpu", "CPU", memory, CPU_STATES_BYTES, CPU_CHUNK)


def _find_gpu(options: EngineOptions) -> Target:
    from kernels_numba.cuda.compiler import CompileError
    from kernels_numba.cuda.driver import CudaError, Device, device_count

    if device_count() == 0:
        raise DeviceError("device cuda: no NVIDIA driver or no GPU here; --device cpu runs without one")
    if options.dtype == "float32":
        raise DeviceError("device cuda: dtype float32 runs on the CPU only")
    try:
        device = Device.open(options.gpu)
        from kernels_numba.cuda.embed import embed

        device.function(embed)  # the smallest kernel: can one be compiled here at all?
    except CudaError as error:
        raise DeviceError(f"device cuda: {error}") from error
    except (CompileError, ImportError) as error:
        raise DeviceError(
            f"device cuda: kernels can't be compiled ({error}); pip install 'lfm2serve[cuda]' brings the tools"
        ) from error
    return Target("cuda", device.name, device.free_bytes(), None, GPU_CHUNK, options.gpu, device.virtual_memory)


def reserve_bytes(target: Target, options: EngineOptions) -> int:
    """Bytes of the device that stay free for others."""
    if options.reserve_gib is not None:
        return int(options.reserve_gib * GIB)
    return GPU_RESERVE_BYTES if target.kind == "cuda" else 0


def graph_bytes(target: Target, options: EngineOptions) -> int:
    """What loaded kernels and the graphs of decode rounds take."""
    if target.kind != "cuda":
        return 0
    from kernels_numba.cuda.graph import BUCKETS, most_round_rows

    largest = most_round_rows(options.max_streams)
    return GPU_KERNEL_BYTES + GRAPH_BYTES * sum(rows <= largest for rows in BUCKETS)


def scratch_bytes(target: Target, config: ModelConfig, options: EngineOptions) -> int:
    """Activations of the largest step, logits, rope tables."""
    rows = max(options.prompt_chunk or target.chunk, options.max_streams)
    positions = options.context or config.max_position_embeddings
    tables = 2 * positions * 32 * 4
    pairs = config.num_experts_per_tok if config.num_experts else 0
    if target.kind == "cuda":
        from kernels_numba.cuda import most_round_rows, scratch_need

        logit_rows = max(most_round_rows(options.max_streams), LOGIT_ROWS)
        ranges = options.max_streams * 4 + positions // ATTENTION_RANGE * 8
        return tables + scratch_need(
            rows, hidden=config.hidden_size, qkv=config.qkv_rows, features=config.intermediate_size, pairs=pairs,
            expert_features=config.moe_intermediate_size, logit_rows=logit_rows, vocab=config.vocab_size, ranges=ranges,
            heads=config.num_attention_heads,
        )  # fmt: skip
    logit_rows = max(options.max_streams, LOGIT_ROWS)
    hidden = config.hidden_size
    widest = max(3 * hidden, config.qkv_rows, 3 * config.intermediate_size)
    widest = max(widest, pairs * (3 * config.moe_intermediate_size + hidden))
    return rows * (4 * hidden + widest) * 4 + 2 * logit_rows * config.vocab_size * 4 + tables


def open_backend(target: Target, options: EngineOptions, scratch: int) -> Backend:
    """The backend of a device; `scratch`: bytes that a step may use."""
    if target.kind == "cuda":
        from kernels_numba.cuda import CudaBackend

        return CudaBackend(target.gpu, scratch_bytes=scratch)
    from kernels_numba.cpu import CpuBackend

    return CpuBackend("float32" if options.dtype == "float32" else "bfloat16", options.threads)
