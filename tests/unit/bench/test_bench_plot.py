"""A chart is refused before anything is measured if it could not be drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.bench import plot
from shoal.errors import UsageError


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install matplotlib"):
        plot.check_can_plot(tmp_path / "a.png")


def test_what_is_no_png_in_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: object())
    plot.check_can_plot(tmp_path / "a.png")
    for wrong in (tmp_path / "a.pdf", tmp_path / "missing" / "a.png"):
        with pytest.raises(UsageError, match=wrong.name) as caught:
            plot.check_can_plot(wrong)
        assert caught.value.field == "plot"


def test_bars_are_a_png_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.bars(tmp_path / "a.png", ["x", "y"], {"one": [1.0, 2.0], "two": [2.0, 1.0]}, "tokens/s")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
