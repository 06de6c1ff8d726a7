"""Fixtures that every test may use."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Two threads a process are slower than one where several processes share two cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The demo model's folder, fetched once into SHOAL_HOME."""
    from shoal.checkpoint.source import resolve

    return resolve("demo")


@pytest.fixture(scope="session")
def families_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny models are saved, once a run."""
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="session")
def workload() -> list[dict[str, Any]]:
    """32 prompts of 20 to 400 tokens, with transformers' greedy ids under ``expected``."""
    prompts: list[dict[str, Any]] = json.loads((DATA / "workload-32.json").read_text())["prompts"]
    expected = json.loads((DATA / "workload-32-reference.json").read_text())
    for prompt in prompts:
        prompt["expected"] = expected[str(prompt["i"])]
    return prompts


@pytest.fixture
def logging_restored() -> Iterator[None]:
    """The command line sets handlers and levels for its process, which here is the tests'."""
    logs = [logging.getLogger(name) for name in ("shoal", "uvicorn")]
    states = [(log, log.handlers[:], log.level, log.propagate) for log in logs]
    yield
    for log, handlers, level, propagate in states:
        log.handlers[:] = handlers
        log.level, log.propagate = level, propagate


@pytest.fixture
def thread_ranks() -> Iterator[None]:
    """Engines of this test run every rank as a thread: the same code without the processes' start."""
    from support.threads import ranks_as_threads

    with ranks_as_threads():
        yield
