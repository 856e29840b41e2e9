"""Fixtures shared by every test."""

from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"

collect_ignore = ["test_ray.py"]  # a step of its own: it needs the extra `ray`


@pytest.fixture(scope="session")
def tiny_moe() -> Path:
    """A random lfm2_moe checkpoint: 4 layers, hidden 256, 4 query and 2 K/V heads, 6 experts, 2 a token."""
    return DATA / "tiny-lfm2moe"


@pytest.fixture(scope="session")
def tiny_dense() -> Path:
    """A random lfm2 checkpoint: 5 layers, hidden 192, 3 query heads on 1 K/V head."""
    return DATA / "tiny-lfm2"


@pytest.fixture(params=["tiny_moe", "tiny_dense"])
def tiny(request: pytest.FixtureRequest) -> Path:
    """Each of the two in turn."""
    path: Path = request.getfixturevalue(request.param)
    return path
