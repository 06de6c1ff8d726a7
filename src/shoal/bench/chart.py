"""A chart of a token's time over the bytes that are read for it, as an SVG file. Knows no engine; needs no
library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from shoal.bench.context import ContextPoint, Growth
from shoal.bench.roof import Roof
from shoal.errors import UsageError

__all__ = ["check_can_chart", "context_chart"]

_WIDTH, _HEIGHT = 680, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 660, 20, 360
_STYLE = (
    "text{font:12px sans-serif;fill:#222}.axis{stroke:#222}.grid{stroke:#ddd}"
    ".measured{stroke:#1f77b4;stroke-width:1.5}.machine{stroke:#d62728;stroke-width:1.5;stroke-dasharray:6 4}"
    "circle{fill:#1f77b4}"
)
_MOST_TICKS = 8


def check_can_chart(path: Path) -> None:
    """Refuse before anything costly is done.

    Raises:
        UsageError: ``path`` is no SVG file in a folder that is there.
    """
    if path.suffix != ".svg" or not path.absolute().parent.is_dir():
        raise UsageError(f"chart: {path} must be a .svg in a folder that exists", field="chart")


def context_chart(points: Sequence[ContextPoint], line: Growth, roof: Roof | None) -> str:
    """Points with the line through them, and the line that the machine's bandwidth gives.

    Args:
        points: at least one, of some bytes.
        line: through the points.
        roof: of the machine; its line begins where the other does. None: it is left out.

    Returns:
        the SVG document.
    """
    last = max(point.kv_bytes for point in points) / 1e6
    fitted = line.base_ms + line.ms_per_gbyte * last / 1e3
    highest = max(fitted, *(point.ms_per_token for point in points))
    x_ticks, y_ticks = _ticks(last), _ticks(highest)

    def x(mbytes: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * mbytes / x_ticks[-1]

    def y(ms: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * ms / y_ticks[-1]

    parts = [_line("grid", x(tick), _TOP, x(tick), _BOTTOM) for tick in x_ticks]
    parts += [_line("grid", _LEFT, y(tick), _RIGHT, y(tick)) for tick in y_ticks]
    parts += [_text(x(tick), _BOTTOM + 18, f"{tick:g}", "middle") for tick in x_ticks]
    parts += [_text(_LEFT - 8, y(tick) + 4, f"{tick:g}", "end") for tick in y_ticks]
    parts += [
        _line("axis", _LEFT, _BOTTOM, _RIGHT, _BOTTOM),
        _line("axis", _LEFT, _TOP, _LEFT, _BOTTOM),
        _text(_RIGHT, _HEIGHT - 20, "MB of keys and values read for a token", "end"),
        _text(_LEFT + 8, _TOP + 12, "ms a token; words: tokens of context", "start"),
        _line("measured", x(0), y(line.base_ms), x(last), y(fitted)),
    ]
    if roof is not None:
        ideal = line.base_ms + 1e3 * last * 1e6 / roof.bytes_per_s
        parts.append(_line("machine", x(0), y(line.base_ms), x(last), y(ideal)))
        words = f"what the machine reads: {roof.bytes_per_s / 1e9:.1f} GB/s"
        parts.append(_text(x(last), y(ideal) + 28, words, "end"))
    for point in points:
        parts.append(
            f'<circle cx="{x(point.kv_bytes / 1e6):.1f}" cy="{y(point.ms_per_token):.1f}" r="4">'
            f"<title>{point.context} tokens: {point.ms_per_token:.2f} ms</title></circle>"
        )
        parts.append(_text(x(point.kv_bytes / 1e6), y(point.ms_per_token) - 9, f"{point.context}", "middle"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="Time of a token over the bytes of keys and values read for it">\n'
        f'<style>{_STYLE}</style>\n<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to the first that is not below ``most``, evenly apart."""
    rough = max(most, 1e-9) / _MOST_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [step * number for number in range(math.ceil(most / step - 1e-9) + 1)]


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'
