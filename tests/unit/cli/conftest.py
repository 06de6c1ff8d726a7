"""Running the command line in this process, with logging and environment put back afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from shoal.cli.main import main


@dataclass(frozen=True)
class Ended:
    """What a command did."""

    status: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture(autouse=True)
def _untouched_surroundings(monkeypatch: pytest.MonkeyPatch, logging_restored: None) -> None:
    for name in os.environ:
        if name.startswith("SHOAL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """``run("generate", "demo", ...)``: the exit status and what was printed."""

    def run_once(*arguments: str) -> Ended:
        status = main(arguments)
        captured = capsys.readouterr()
        return Ended(status, captured.out, captured.err)

    return run_once
