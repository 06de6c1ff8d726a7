"""Fixtures of the tests on real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Four processes for the whole run, started by the first job."""
    pool = RankPool()
    yield pool
    pool.close()
