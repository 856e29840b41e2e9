"""Numba kernels for the LFM2 family: one file an operation, one backend a device. Knows nothing of any server."""
