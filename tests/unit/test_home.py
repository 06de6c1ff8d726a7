"""Where shoal keeps things."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.home import home


def test_home_is_shoal_home_and_read_at_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "a"))
    assert home() == tmp_path / "a"
    monkeypatch.setenv("SHOAL_HOME", "~/b")
    assert home() == Path.home() / "b"
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("SHOAL_HOME")
        else:
            monkeypatch.setenv("SHOAL_HOME", unset)
        assert home() == Path.home() / ".cache" / "shoal"
