"""Mixture of experts: sigmoid router with a selection bias, experts run grouped, outputs added in ascending id."""

from __future__ import annotations

import numpy as np

from ..jit import device, kernel
from .functions import rounded, sigmoid
from .linear import gate_up_part, linear_part, part_of
from .simd import LANES, load, splat, store
from .team import spread

EPSILON = np.float32(1e-6)
ZERO = np.float32(0.0)


@kernel
def route(logits, bias, has_bias, normalize, scaling, ids, weights, bf16):
    """Choose top_k experts a row from router logits [rows, experts]: largest sigmoid + bias, ties to the lower id.

    `ids` [rows, top_k] come out ascending; `weights` are the chosen sigmoids without the bias, divided by their sum
    (+ 1e-6) if `normalize`, times `scaling`.
    """
    rows, experts = logits.shape
    top_k = ids.shape[1]
    scores = np.empty(experts, np.float32)
    taken = np.empty(experts, np.bool_)
    for row in range(rows):
        for e in range(experts):
            scores[e] = rounded(sigmoid(logits[row, e]), bf16)
            taken[e] = False
        for _ in range(top_k):
            best, best_value = -1, ZERO
            for e in range(experts):
                value = scores[e] + bias[e] if has_bias else scores[e]
                if not taken[e] and (best < 0 or value > best_value):
                    best, best_value = e, value
            taken[best] = True
        j, total = 0, ZERO
        for e in range(experts):
            if taken[e]:
                ids[row, j] = e
                weights[row, j] = scores[e]
                total += scores[e]
                j += 1
        divisor = rounded(rounded(total, bf16) + EPSILON, bf16)
        for j in range(top_k):
            weight = weights[row, j]
            if normalize:
                weight = rounded(weight / divisor, bf16)
            weights[row, j] = rounded(weight * scaling, bf16)


@device
def group_by_expert(x, ids, experts, start, place, grouped):
    """Copy each row once per chosen expert, expert by expert: expert e's are grouped[start[e]:start[e + 1]].

    place[row, j] is where the copy of `row` for its j-th expert lies.
    """
    rows, top_k = ids.shape
    start[:] = 0
    for row in range(rows):
        for j in range(top_k):
            start[ids[row, j] + 1] += 1
    for e in range(experts):
        start[e + 1] += start[e]
    filled = start.copy()
    for row in range(rows):
        for j in range(top_k):
            place[row, j] = filled[ids[row, j]]
            grouped[place[row, j]] = x[row]
            filled[ids[row, j]] += 1


@device
def experts_up_part(part, parts, grouped, start, w13, act, bf16):
    for e in range(w13.shape[0]):
        if start[e + 1] > start[e]:
            gate_up_part(part, parts, grouped, start[e], start[e + 1], w13[e], act, bf16)


run_experts_up = spread(experts_up_part)


@device
def experts_down_part(part, parts, act, start, w2, y, bf16):
    for e in range(w2.shape[0]):
        if start[e + 1] > start[e]:
            linear_part(part, parts, act, start[e], start[e + 1], w2[e], y, False, y, bf16)


run_experts_down = spread(experts_down_part)


@device
def combine_part(part, parts, y, place, weights, residual, out, bf16):
    """r(residual + r(sum of r(weight * y))), the sum in float32 in ascending expert id."""
    first, last = part_of(out.shape[0], part, parts)
    hidden = out.shape[1]
    for row in range(first, last):
        for at in range(0, hidden, LANES):
            total = splat(ZERO)
            for j in range(place.shape[1]):
                total = total + rounded(splat(weights[row, j]) * load(y, place[row, j] * hidden + at), bf16)
            store(out, row * hidden + at, rounded(load(residual, row * hidden + at) + rounded(total, bf16), bf16))


run_combine = spread(combine_part)


@kernel
def run_experts(team, x, ids, weights, w13, w2, residual, grouped, act, y, out, bf16, parts):
    """The chosen experts' SwiGLU of each row; an expert's weights are read once however many rows chose it.

    `grouped` and `y` [rows * top_k, hidden] and `act` [rows * top_k, features] are scratch.
    """
    start = np.empty(w13.shape[0] + 1, np.int64)
    place = np.empty(ids.shape, np.int64)
    group_by_expert(x, ids, w13.shape[0], start, place, grouped)
    run_experts_up(team, parts, (grouped, start, w13, act, bf16))
    run_experts_down(team, parts, (act, start, w2, y, bf16))
    run_combine(team, parts, (y, place, weights, residual, out, bf16))
