"""Teams of threads for the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shoal.jit.team import Team


@pytest.fixture(autouse=True)
def _same_numbers_each_run() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def team() -> Iterator[Team]:
    """One thread."""
    team = Team(1)
    yield team
    team.close()


@pytest.fixture(scope="session")
def pair() -> Iterator[Team]:
    """Two threads."""
    team = Team(2)
    yield team
    team.close()
