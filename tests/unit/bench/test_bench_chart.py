"""The chart of a token's time over its context: every point and line stands where its numbers say."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from shoal.bench.chart import check_can_chart, context_chart
from shoal.bench.context import ContextPoint, growth
from shoal.bench.roof import Roof
from shoal.errors import UsageError

SVG = "{http://www.w3.org/2000/svg}"
POINTS = [ContextPoint(n, 15 + n / 400, 46000.0 * n, None, None, ()) for n in (256, 2048, 8000)]
ROOF = Roof(2, 32e9, 1.0)


def lines(root: ElementTree.Element, kind: str) -> list[tuple[float, ...]]:
    """Ends of the lines of a kind: x1, y1, x2, y2."""
    found = [line for line in root.iter(f"{SVG}line") if line.get("class") == kind]
    return [tuple(float(line.get(name, "")) for name in ("x1", "y1", "x2", "y2")) for line in found]


def test_points_lie_on_the_line_through_them() -> None:
    root = ElementTree.fromstring(context_chart(POINTS, growth(POINTS, ROOF), ROOF))
    ((x1, y1, x2, y2),) = lines(root, "measured")
    circles = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in root.iter(f"{SVG}circle")]
    assert len(circles) == 3 and circles[-1] == pytest.approx((x2, y2), abs=0.11)
    for x, y in circles:
        assert y == pytest.approx(y1 + (y2 - y1) * (x - x1) / (x2 - x1), abs=0.11)
    assert {"256", "2048", "8000"} <= {text.text for text in root.iter(f"{SVG}text")}


def test_the_machines_line_rises_as_its_bandwidth_says() -> None:
    line = growth(POINTS, ROOF)
    root = ElementTree.fromstring(context_chart(POINTS, line, ROOF))
    (measured,), (machine,) = lines(root, "measured"), lines(root, "machine")
    assert machine[:2] == measured[:2], "both begin at the time of a token without context"
    rises = [line_[1] - line_[3] for line_ in (machine, measured)]
    assert line.bandwidth_share == pytest.approx(rises[0] / rises[1], rel=0.01)
    root = ElementTree.fromstring(context_chart(POINTS, line, None))
    assert not lines(root, "machine")


@pytest.mark.parametrize("scale", [1e-3, 1.0, 37.0, 1e4])
def test_everything_lies_within_the_axes(scale: float) -> None:
    points = [
        ContextPoint(p.context, scale * p.ms_per_token, scale * p.kv_bytes, None, None, ()) for p in POINTS
    ]
    root = ElementTree.fromstring(context_chart(points, growth(points, None), None))
    ((left, bottom, right, _),) = [line for line in lines(root, "axis") if line[1] == line[3]]
    for circle in root.iter(f"{SVG}circle"):
        assert left <= float(circle.get("cx", "")) <= right
        assert 0 < float(circle.get("cy", "")) <= bottom
    assert 4 <= len([x for x, _, end, _ in lines(root, "grid") if x == end]) <= 10


def test_what_is_no_svg_in_a_folder_is_refused(tmp_path: Path) -> None:
    check_can_chart(tmp_path / "a.svg")
    for wrong in (tmp_path / "a.png", tmp_path / "missing" / "a.svg"):
        with pytest.raises(UsageError, match=wrong.name) as caught:
            check_can_chart(wrong)
        assert caught.value.field == "chart"
