"""A flood in small: a tiny model, 500 connections, a queue of 64."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.flood import HEALTH_PROBLEM, HEALTH_S, run
from support.families import save
from support.programs import Server

pytestmark = pytest.mark.slow


@pytest.fixture
def server(families_path: Path, tmp_path: Path):
    model = save("llama", families_path)
    options = ("--max-num-seqs", "8", "--max-num-queued-requests", "64", "--kv-cache-memory-bytes", "4000000")
    server = Server(str(model), *options, log=tmp_path / "log")
    yield server
    assert server.stop() == 0


def test_five_hundred_connections_are_all_answered_and_those_let_in_rightly(server: Server) -> None:
    """How soon ``/health`` answers is held loosely, since other tests may keep the cores busy."""
    report = run(server, 500, seed=5)
    print(report)
    assert not set(report.problems) - {HEALTH_PROBLEM}, report
    assert report.health_s["of 100, 99 within"] < HEALTH_S and report.health_s["most"] < 10 * HEALTH_S
