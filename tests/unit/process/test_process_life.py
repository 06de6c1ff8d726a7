"""A child of ours notices its parent's end."""

from __future__ import annotations

import fcntl
import os

import pytest

from shoal.process.life import watch


@pytest.mark.parametrize("least", [3, 1100])
def test_the_end_of_the_life_pipe_ends_the_process_whatever_its_number(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """select() takes no descriptor above 1023; a program with many open files hands down such ones."""
    read_end, write_end = os.pipe()
    watched = fcntl.fcntl(read_end, fcntl.F_DUPFD, least)
    os.close(read_end)
    os.close(write_end)

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit) as caught:
        watch(watched, os.getppid())
    os.close(watched)
    assert caught.value.code == 1
