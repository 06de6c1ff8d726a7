"""A chart of speeds as a PNG file. matplotlib is optional, and imported only here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.errors import UsageError

__all__ = ["bars", "check_can_plot"]


def check_can_plot(path: Path) -> None:
    """Refuse before anything costly is done.

    Raises:
        UsageError: matplotlib is not installed, or ``path`` is no PNG file in a folder that is there.
    """
    if path.suffix != ".png" or not path.absolute().parent.is_dir():
        raise UsageError(f"plot: {path} must be a .png in a folder that exists", field="plot")
    if find_spec("matplotlib") is None:
        raise UsageError("plot: needs matplotlib: pip install matplotlib", field="plot")


def bars(path: Path, groups: Sequence[str], series: Mapping[str, Sequence[float]], unit: str) -> None:
    """Grouped bars.

    Args:
        path: the PNG file to write.
        groups: names along the axis.
        series: name to one height a group.
        unit: of the heights.
    """
    figure, axes = _figure(max(6.0, 1.1 * len(groups)))
    width = 0.8 / max(len(series), 1)
    for number, (name, heights) in enumerate(series.items()):
        left = [at + (number - (len(series) - 1) / 2) * width for at in range(len(groups))]
        axes.bar(left, heights, width, label=name)
    axes.set_xticks(range(len(groups)), groups, rotation=30, ha="right")
    axes.set_ylabel(unit)
    axes.legend()
    figure.savefig(path, dpi=150)


def _figure(width: float) -> tuple[Any, Any]:
    """A figure and its axes, drawn without a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found, unused-ignore]
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    figure = Figure(figsize=(width, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()
