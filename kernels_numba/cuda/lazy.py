"""Activations whose kernel is queued with whatever reads them first, so that it can be part of another kernel."""

from __future__ import annotations

from typing import Any

from . import norm as _norm
from . import route as _route
from .driver import DeviceArray
from .memory import DeviceMemory
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

    def finish(self) -> None:
        x, weight, eps = self.claim()
        if isinstance(x, ExpertSum) and x.pending:
            x.finish_with_norm(weight, eps, self._owner)
        else:
            self._backend.launch(_norm.rms_norm, len(x), _norm.THREADS, x, weight, eps, x.shape[1], self._owner)


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

    def finish_with_norm(self, weight: DeviceArray, eps: float, normed: Activations) -> None:
        """Queue the sum and the norm of its result in one kernel."""
        y, place, residual, top_k = self._parts
        rows, hidden = self.shape
        self.pending, self._parts = False, ()
        self._backend.launch(
            _route.combine_experts_norm, rows, 256, y, place, residual, top_k, weight, eps, hidden, self._owner, normed
        )
