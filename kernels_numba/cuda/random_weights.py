"""Random weights made on the device, for measuring without a checkpoint."""

from __future__ import annotations

import numpy as np
from numba import cuda

from .compiler import kernel
from .functions import log
from .sample import random_bits
from .scalar import cosine, mul, pack, sqrt, store4
from .unroll import registers, static, unrolled

THREADS = 256
TWO_PI = np.float32(6.283185307179586)
QUARTER = np.float32(1.5707963267948966)
MINUS_TWO = np.float32(-2.0)
UNIT = np.float32(2.0**-32)


@kernel("u32* i64 u64 u32 f32", threads=THREADS)
@unrolled
def random_normal(out, pieces, seed, tensor, scale):
    """Fill bf16 values, 8 a piece, with a normal distribution (Box and Muller). Grid: any."""
    for piece in range(cuda.grid(1), pieces, cuda.gridsize(1)):
        words = registers(4)
        for i in static(4):
            bits = random_bits(seed, np.uint32(tensor), np.uint64(piece) * np.uint64(4) + np.uint64(i))
            u = mul(np.float32(np.uint32(bits >> np.uint64(32)) | np.uint32(1)), UNIT)
            angle = mul(mul(np.float32(np.uint32(bits)), UNIT), TWO_PI)
            size = mul(sqrt(mul(MINUS_TWO, log(u))), scale)
            words[i] = pack(mul(size, cosine(angle)), mul(size, cosine(angle - QUARTER)))
        store4(out, piece * 4, words)
