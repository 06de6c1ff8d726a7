"""The soak in short, on a tiny model: three minutes of it; twenty by ``make soak``."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.soak import CHECKING, run
from support.families import save
from support.programs import Server

pytestmark = pytest.mark.slow

_MINUTES = 3.0


def test_mixed_traffic_leaves_nothing_behind(families_path: Path, tmp_path: Path) -> None:
    options = ("--num-gpu-blocks-override", "30", "--max-num-queued-requests", "8", "--max-model-len", "256")
    server = Server(str(save("llama", families_path)), *options, *CHECKING, log=tmp_path / "log")
    try:
        report = run(server, _MINUTES, num_clients=12, seed=11)
    finally:
        status = server.stop()
    print(report)
    assert status == 0, server.log.read_text()
    assert not report.problems, report
    assert "Traceback" not in server.log.read_text()
