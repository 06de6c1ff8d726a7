"""One thread that computes, for all tests of fused layers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.jit.team import Team


@pytest.fixture(scope="session")
def team() -> Iterator[Team]:
    team = Team(1)
    yield team
    team.close()
