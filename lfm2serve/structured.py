"""Replies that follow a grammar: which tokens may be drawn next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Constraint(Protocol):
    """Which tokens of one reply may be drawn; used on the engine's thread only."""

    def mask(self, ahead: Sequence[int]) -> NDArray[np.uint32] | None:
        """Bits of the tokens that are allowed after what was accepted and then `ahead`: words [ceil(head rows / 32)];
        None: all. Changes nothing."""
        ...

    def accept(self, token: int) -> None:
        """Take a drawn token."""
        ...
