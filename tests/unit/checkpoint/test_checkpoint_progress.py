"""Progress goes to stderr, and only where it is wanted."""

from __future__ import annotations

import sys

import pytest

from shoal.checkpoint.progress import reporting, say


def test_nothing_is_written_when_not_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    say("a line", wanted=False)
    with reporting("Working", wanted=False) as report:
        report(1, 2)
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_one_plain_line_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    with reporting("Working", wanted=True) as report:
        report(1, 2)
    assert capsys.readouterr() == ("", "Working ...\n")


def test_on_a_terminal_a_bar_is_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with reporting("Working", wanted=True) as report:
        report(1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Working" in err
    assert "50%" in err
