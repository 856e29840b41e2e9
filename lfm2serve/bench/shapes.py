"""What a model's shape says about a round's work: the figures to hold a measurement against."""

from __future__ import annotations

import numpy as np

from lfm2serve.config import ModelConfig
from lfm2serve.dummy import tensor_shapes


def round_bytes(config: ModelConfig, rows: int) -> float:
    """Weight bytes that a decode round of `rows` rows reads, experts chosen evenly; K/V apart."""
    share = 1.0
    if config.num_experts:
        share = 1 - (1 - config.num_experts_per_tok / config.num_experts) ** rows
    sizes = ((name, 2.0 * float(np.prod(dims))) for name, dims in tensor_shapes(config))
    return sum(size * (share if ".moe.w" in name else 1.0) for name, size in sizes)


def product_flops(config: ModelConfig, rows: int) -> float:
    """Floating-point operations of a prompt's products (logits and attention scores apart)."""
    active = config.num_experts_per_tok / config.num_experts if config.num_experts else 0.0
    sizes = ((name, dims) for name, dims in tensor_shapes(config) if len(dims) > 1 and name != "embed")
    return 2.0 * rows * sum(float(np.prod(dims)) * (active if len(dims) == 3 else 1.0) for name, dims in sizes)
