"""What a backend is told about the rows of one forward pass and about how their tokens are drawn."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PAGE_ROWS = 512
"""Positions in one page of the K/V cache."""

RING_ROWS = 32
"""Convolution inputs that a stream keeps: position p lies in row p % RING_ROWS."""

FED_BACK = -1
"""As the token of a decode row: the one that the round before draws for the row's slot."""


class Batch(NamedTuple):
    """R rows packed from S segments; a segment is a run of consecutive positions of one stream, and no two are of one.

    Position p of slot s lies in page `page_table[s, p // PAGE_ROWS]`, row `p % PAGE_ROWS`.
    """

    tokens: NDArray[np.int32]
    """[R]"""
    positions: NDArray[np.int32]
    """[R], absolute"""
    row_segment: NDArray[np.int32]
    """[R], the segment of each row"""
    seg_start: NDArray[np.int32]
    """[S + 1], segment s is rows seg_start[s]:seg_start[s + 1]; S >= 1 and none is empty"""
    seg_slot: NDArray[np.int32]
    """[S], the stream slot: its row of the convolution ring and of the page table"""
    page_table: NDArray[np.int32]
    """[slots, pages a stream]"""


class SampleRows(NamedTuple):
    """How the next token of each of n rows is drawn; V is the width of the logits."""

    temperature: NDArray[np.float32]
    """[n], 0 takes the most likely token"""
    top_k: NDArray[np.int32]
    """[n], 0 is off"""
    top_p: NDArray[np.float32]
    """[n], 1 is off"""
    min_p: NDArray[np.float32]
    """[n], 0 is off; relative to the largest probability after temperature"""
    repetition: NDArray[np.float32]
    """[n], 1 is off; each token of prompt or output once"""
    presence: NDArray[np.float32]
    """[n], 0 is off; output tokens"""
    frequency: NDArray[np.float32]
    """[n], 0 is off; output tokens, times their count"""
    seed: NDArray[np.uint64]
    """[n], key of the random numbers"""
    choice: NDArray[np.uint32]
    """[n], which of a request's replies"""
    position: NDArray[np.uint32]
    """[n], absolute position of the drawn token"""
    slot: NDArray[np.int32]
    """[n], row of the two tables; read only where a penalty is on"""
    prompt_seen: NDArray[np.uint8]
    """[slots, V], 1 where the prompt holds the token"""
    output_count: NDArray[np.int32]
    """[slots, V], how often the reply holds the token"""
    bias_start: NDArray[np.int32]
    """[n + 1], row i's biases are entries bias_start[i]:bias_start[i + 1]"""
    bias_id: NDArray[np.int32]
    bias_value: NDArray[np.float32]
    ban_start: NDArray[np.int32]
    """[n + 1], row i's banned ids are entries ban_start[i]:ban_start[i + 1]"""
    ban_id: NDArray[np.int32]
    ahead_start: NDArray[np.int32]
    """[n + 1], row i's draft tokens before it are entries ahead_start[i]:ahead_start[i + 1]; penalties take them as
    drawn"""
    ahead_id: NDArray[np.int32]
    mask_row: NDArray[np.int32]
    """[n], the row of `mask` that says which tokens may be drawn; -1: all"""
    mask: NDArray[np.uint32]
    """[m, words], bit i % 32 of word i // 32 is 1 where token i may be drawn; words cover `vocab`"""
    vocab: int
    """ids from here on are never drawn and take no part in log-probabilities"""
    top_n: NDArray[np.int32]
    """[n], log-probabilities wanted: -1 none, 0 the drawn token's, k also the k best"""


class SampleResult(NamedTuple):
    """Drawn tokens; T is the largest `top_n` (at least 0). Unwanted entries hold NaN, rank 0 and id -1."""

    token: NDArray[np.int32]
    """[n]"""
    logprob: NDArray[np.float32]
    """[n], of the raw logits normalised over [0, vocab)"""
    rank: NDArray[np.int32]
    """[n], 1 for the most likely token; of equal logits the lower id ranks first"""
    top_ids: NDArray[np.int32]
    """[n, T], most likely first"""
    top_logprobs: NDArray[np.float32]
    """[n, T]"""
