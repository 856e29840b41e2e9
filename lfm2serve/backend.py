"""What the network, the states and the engine ask of a backend; `kernels_numba.cpu` and `.cuda` both give it.

Arrays are the backend's own (NumPy's on the CPU, in device memory on a GPU): nobody else looks into them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kernels_numba.batch import Batch, SampleResult, SampleRows
from kernels_numba.weights import WeightSink
from lfm2serve.memory.arena import Mapper

Array = Any
ARENA_SLACK = 1 << 20  # of an arena: each tensor begins on a cache line of its own


class Pages(Protocol):
    """K/V pages; `data` has one run of memory a page. mapper: gives parts of it memory (None: all of it has)."""

    @property
    def data(self) -> Array: ...

    @property
    def mapper(self) -> Mapper | None: ...

    @property
    def page_bytes(self) -> int: ...


class Penalties(Protocol):
    """Tokens of each slot's prompt and reply; `views` are SampleRows' prompt_seen and output_count."""

    @property
    def views(self) -> tuple[Any, Any]: ...

    def open(self, slot: int, prompt: Sequence[int]) -> None: ...

    def record(self, slot: int, token: int) -> None: ...


class Round(Protocol):
    """A decode round under way; `result` waits for what was drawn. network_done: the device waits for the draw."""

    @property
    def network_done(self) -> bool: ...

    def result(self) -> SampleResult: ...


class Rounds(Protocol):
    """Decode rounds that are queued and taken later, with the same bits: `begin` queues the network, `draw` a token
    behind each of its rows. The next round may begin before the result is taken: a row's token FED_BACK is what the
    round before draws for its slot."""

    def fits(self, batch: Batch) -> bool: ...

    def begin(self, batch: Batch) -> Any: ...

    def draw(self, begun: Any, rows: SampleRows) -> None: ...


class Runs(Protocol):
    """Layers that a backend can run as one operation. `run` goes on behind attention layer `first`, with its y [R, H]
    before out_proj and the residual stream h before it: the residual stream then, the next attention's first product or
    None, and the layer that follows. None: not those layers, or not this batch."""

    def run(
        self, backend: Any, first: int, y: Array, h: Array, batch: Any, ring: Array
    ) -> tuple[Array, Array | None, int] | None: ...


class Backend(Protocol):
    """The operations; see `kernels_numba.cpu.CpuBackend` for what each computes."""

    @property
    def name(self) -> str: ...

    def attach(self) -> None: ...

    def together(self) -> AbstractContextManager[None]: ...

    def timed(self, work: Callable[[], object]) -> float: ...

    def weight_sink(self, nbytes: int) -> WeightSink: ...

    def upload(self, tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]: ...

    def random_weights(self, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, Any] | None: ...

    def free(self, array: Array) -> None: ...

    def norm_weight(self, bits: Any) -> Array: ...

    def rope_tables(self, theta: float, max_position: int) -> tuple[Array, Array]: ...

    def allocate_kv(self, pages: int, attention_layers: int, kv_heads: int, *, lazy: bool = False) -> Pages: ...

    def allocate_ring(self, conv_layers: int, slots: int, hidden: int) -> Array: ...

    def allocate_taps(self, taps: int, conv_layers: int, hidden: int) -> Array: ...

    def allocate_bytes(self, nbytes: int) -> Array: ...

    def bytes_of(self, array: Array) -> Array: ...

    def read(self, array: Array) -> NDArray[Any]: ...

    def copy(self, target: Array, source: Array, plan: Sequence[tuple[int, int, int]]) -> None: ...

    def penalty_tables(self, slots: int, width: int) -> Penalties: ...

    def begin(self, batch: Any, tap_rows: NDArray[np.int32] | None = None) -> Any: ...

    def take(self, x: Array, rows: Sequence[int]) -> Array: ...

    def embed(self, tokens: Any, weight: Array) -> Array: ...

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array: ...

    def linear(self, x: Array, weight: Array, residual: Array | None = None) -> Array: ...

    def conv_taps(self, bcx: Array, ring: Array, layer: int, batch: Any, rows: Any, taps: Array) -> None: ...

    def short_conv(self, bcx: Array, conv_weight: Array, ring: Array, layer: int, batch: Any) -> Array: ...

    def attention_inputs(
        self, qkv: Array, q_norm: Array, k_norm: Array, eps: float, cos: Array, sin: Array,
        kv: Any, layer: int, batch: Any, heads: int, kv_heads: int,
    ) -> Array: ...  # fmt: skip

    def attention(self, q: Array, kv: Any, layer: int, batch: Any, heads: int, kv_heads: int) -> Array: ...

    def swiglu(self, x: Array, w13: Array, w2: Array, residual: Array) -> Array: ...

    def moe(
        self, x: Array, gate: Array, expert_bias: Array | None, w13: Array, w2: Array,
        top_k: int, norm_topk: bool, scaling: float, residual: Array,
    ) -> Array: ...  # fmt: skip

    def layer_runs(
        self, layers: Sequence[Any], top_k: int, normalize: bool, scaling: float, eps: float
    ) -> Runs | None: ...

    def logits(self, x: Array, weight: Array, out: Array | None = None) -> Array: ...

    def sample(
        self, logits: Array, rows: SampleRows, meanwhile: Callable[[], object] | None = None
    ) -> SampleResult: ...

    def decode_rounds(
        self,
        forward: Callable[[Any, Any], object],
        tables: Any,
        *,
        width: int,
        vocab: int,
        page_table: NDArray[np.int32],
        slots: int,
        context: int,
    ) -> Rounds | None: ...

    def token_logprobs(
        self, logits: Array, targets: NDArray[np.int32], top_n: NDArray[np.int32], vocab: int
    ) -> tuple[Any, Any, Any, Any]: ...

    def close(self) -> None: ...
