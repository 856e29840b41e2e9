"""How a run of layers is written down for the layers' kernel (see persistent.py), and where what lies in a block's
shared memory."""

from __future__ import annotations

from .decode_parts import SUM_DEPTH
from .route import TILE

CONSUMERS = 8
"""Warps that compute: pieces of a row of up to 2,048, and one unit of weights each."""
ROW_THREADS = 32 * CONSUMERS
THREADS = ROW_THREADS + 32
NUMBERS_READY, WEIGHTS_READY, CHOICE_FREE = 3, 4, 5
"""Barriers between the weight warp and the others: which experts were chosen, the weights that their results get, and
that nobody reads those of the layer before any more."""
MOST_SLOTS = 64
MOST_TOP = 4
"""Most experts of a row."""
MOST_ROWS = 2
"""Most rows of a round whose layers run so: all of their experts have a warp each."""

CONVOLUTION, RESIDUAL, UP, DOWN, LAST = range(5)
"""Phases of a run: norm, B, C and x, convolution · product and residual · norm, router, gate and up
with SwiGLU · down, weighted, sum over experts · norm, product."""

PHASE_BYTES = 128
MOST_PHASES = 24
KIND, UNITS, DEPTH, SOURCE, RESULT, LOGITS, STATE = range(0, 28, 4)
WEIGHTS, EXPERT_BYTES, NORM, OWN, BIAS = range(32, 72, 8)
"""Bytes of a phase: kind; units of weights, of one expert; k; where, from the beginning of the exchanged words, its
input lies (GIVEN: the run's input), its result, the router's logits; the convolution's layer; the weights, the bytes of
an expert's; the norm's weights; the router's weights or the convolution's; the router's bias."""
GIVEN = -1
NO_PAIR = 0xFFFF
"""In a set's word, for a row that didn't choose the set's expert; see `choices`."""

SHARED = 232448
"""Bytes of shared memory that a block asks for at most."""


def layout(rows: int) -> dict[str, int]:
    """Where a block's shared memory has what, for a number of rows.

    Two barriers a slot, the rows in bf16 as they are and normed, LINE bytes apart (two rows are read at once: from
    different banks), parts of sums, channels, the choice (weights [rows, MOST_TOP], PAIRS: a word a set, SETS: their
    number), the program, what a product takes from other blocks, and the ring of weights.
    """
    place: dict[str, int] = {}
    used = 16 * MOST_SLOTS

    def room(name: str, nbytes: int) -> None:
        nonlocal used
        place[name] = used
        used += nbytes

    line = 2 * SUM_DEPTH + (16 if rows > 1 else 0)
    room("STREAM", rows * line)
    room("NORMED", rows * line)
    room("SQUARED", rows * 4 * ROW_THREADS)
    room("LOGIT_PARTS", rows * 4 * CONSUMERS * TILE)
    room("CHANNELS", rows * 32 * MOST_TOP)
    room("CHOSEN", rows * 4 * MOST_TOP)
    room("PAIRS", 4 * CONSUMERS)
    room("SETS", 4)
    used = -(-used // 128) * 128
    room("PROGRAM", PHASE_BYTES * MOST_PHASES)
    room("INPUT", input_bytes(rows))
    return place | {"LINE": line, "RING": -(-used // 128) * 128, "ROWS": rows}


def input_bytes(rows: int) -> int:
    """Bytes of what a product takes from other blocks: at most the rows of all pairs of row and expert."""
    return 16384 if rows == 1 else rows * 14336
