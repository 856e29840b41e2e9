"""Activations whose kernel is queued with whatever reads them first, so that it can be part of another kernel."""

from __future__ import annotations

from typing import Any

from . import norm as _norm
from . import rope as _rope
from . import route as _route
from .driver import DeviceArray
from .linear import Summed, bind_linear, bind_sum, sum_plan
from .memory import DeviceMemory
from .pack import PackedWeight
from .scratch import Activations


class Normed(Activations):
    """An RMSNorm that is queued with whatever reads it first."""

    __slots__ = ("_backend", "_given", "_owner")

    def __init__(self, backend: DeviceMemory, x: Activations, weight: DeviceArray, eps: float) -> None:
        self._owner = backend.scratch.take(x.shape, "bf16")
        super().__init__(self._owner.memory, None)
        self._backend = backend
        self._given: Any = (x, weight, eps)
        self.pending = True

    def claim(self) -> tuple[Activations, DeviceArray, float]:
        """What is to be normed, and with what; the caller queues it."""
        given, self.pending, self._given = self._given, False, None
        return given  # type: ignore[no-any-return]

    def claim_sum(self) -> Summed | None:
        """A single row's pending sum over experts and this norm of it, to be computed inside another kernel; nobody
        else can read these rows then. None: it is something else."""
        if not self.pending or self._given is None or len(self) != 1:
            return None
        x, weight, eps = self._given
        if not (isinstance(x, ExpertSum) and x.pending):
            return None
        self._given = None
        y, residual, top_k = x.claim()
        return Summed(y.array, residual.array, top_k, weight, eps, x.memory)

    def finish(self) -> None:
        assert self._given is not None, "these rows were normed inside the kernel that read them"
        x, weight, eps = self.claim()
        if isinstance(x, ExpertSum) and x.pending:
            x.finish_with_norm(weight, eps, self._owner)
        else:
            self._backend.launch(_norm.rms_norm, len(x), _norm.THREADS, x, weight, eps, x.shape[1], self._owner)


class Projected(Activations):
    """A product that is queued with whatever reads it first: a convolution takes it into its own kernel."""

    __slots__ = ("_backend", "_given", "_owner")

    def __init__(self, backend: DeviceMemory, x: Activations, weight: PackedWeight) -> None:
        self._owner = backend.scratch.take((len(x), weight.outputs), "bf16")
        super().__init__(self._owner.memory, None)
        self._backend = backend
        self._given: Any = (x, weight)
        self.pending = True

    def claim(self) -> tuple[Activations, PackedWeight]:
        """What is to be multiplied; the caller queues it."""
        given, self.pending, self._given = self._given, False, None
        return given  # type: ignore[no-any-return]

    def finish(self) -> None:
        x, weight = self.claim()
        be, out = self._backend, self._owner.memory
        plan = sum_plan(be.device, weight)
        summed = x.claim_sum() if isinstance(x, Normed) and plan is not None else None
        if plan is not None and summed is not None:
            bind_sum(be.device, plan, summed, weight, out, dependent=be.dependent).run(be.stream)
        else:
            bind_linear(be.device, x.array, weight, out, dependent=be.dependent).run(be.stream)


class Queries(Activations):
    """Queries, and keys and values for the cache, that the attention of few rows takes into its own kernel."""

    __slots__ = ("_backend", "_given", "_owner")

    def __init__(self, backend: DeviceMemory, qkv: Activations, heads: int, *given: Any) -> None:
        """given: `attention_inputs`' arguments from q_norm to kv_heads."""
        self._owner = backend.scratch.take((len(qkv), heads * _rope.HEAD), "bf16")
        super().__init__(self._owner.memory, None)
        self._backend = backend
        self._given: Any = (qkv, *given)
        self.pending = True

    def claim(self) -> tuple[Any, ...]:
        """What the kernel is given; the caller queues another one for it."""
        given, self.pending, self._given = self._given, False, None
        return given  # type: ignore[no-any-return]

    def finish(self) -> None:
        given = self.claim()
        blocks = -(-(given[-2] + 2 * given[-1]) // _rope.WARPS)
        self._backend.launch(_rope.attention_inputs, (len(self), blocks), _rope.THREADS, *given, self._owner)


class ExpertSum(Activations):
    """A residual stream whose sum over experts is queued with whatever reads it first; a norm takes it into its
    kernel."""

    __slots__ = ("_backend", "_owner", "_parts")

    def __init__(
        self, backend: DeviceMemory, residual: Activations, y: Activations, place: Activations, top_k: int
    ) -> None:
        self._owner = backend.scratch.take(residual.shape, "bf16")
        super().__init__(self._owner.memory, None)
        self._backend = backend
        self._parts: Any = (y, place, residual, top_k)
        self.pending = True

    def finish(self) -> None:
        y, place, residual, top_k = self._parts
        rows, hidden = self.shape
        self._backend.launch(_route.combine_experts, rows, 256, y, place, residual, top_k, hidden, self._owner)
        self._parts = ()

    def claim(self) -> tuple[Activations, Activations, int]:
        """What is to be summed where it is a single row's experts, in order: those, the residual, how many. The caller
        queues it."""
        y, _, residual, top_k = self._parts
        self.pending, self._parts = False, ()
        return y, residual, top_k

    def finish_with_norm(self, weight: DeviceArray, eps: float, normed: Activations) -> None:
        """Queue the sum and the norm of its result in one kernel."""
        y, place, residual, top_k = self._parts
        rows, hidden = self.shape
        self.pending, self._parts = False, ()
        self._backend.launch(
            _route.combine_experts_norm, rows, 256, y, place, residual, top_k, weight, eps, hidden, self._owner, normed
        )
