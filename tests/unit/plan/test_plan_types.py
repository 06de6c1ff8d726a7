"""The plan as data."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import PlanError
from shoal.plan.types import (
    ArgumentSlice,
    KeyValueHeads,
    Patch,
    Plan,
    Region,
    Split,
    even_ranges,
    pattern_of,
    total,
)

PLAN = Plan(
    tp=2,
    model_class="X",
    params={
        "a.*.w.weight": Split("column", 1, 7, (((0, 2), (4, 5)), ((2, 4), (5, 7))), "split", "why"),
        "a.3.w.weight": Split("replicate", reason="differs"),
    },
    patches=(Patch("a.*", "A", "config.heads", 4, (3, 1)),),
    args=(ArgumentSlice("a.*", "#2", 0, 4, (((0, 3),), ((3, 4),))),),
    kv=(KeyValueHeads(((0, 3), (5, 6)), (2, 1), 8, 16, True),),
    regions=(Region("a.*.o.weight", ("a.*.w.weight",), 4, (3, 1), 8, (4, 8), ()),),
    evidence={"proved": True, "relative_error": 1e-15},
)


@pytest.mark.parametrize("encode", ["json", "msgpack"])
def test_a_plan_survives_the_wire(encode: str) -> None:
    data = PLAN.to_dict()
    if encode == "json":
        back = json.loads(json.dumps(data))
    else:
        back = msgspec.msgpack.decode(msgspec.msgpack.encode(data))
    assert Plan.from_dict(back) == PLAN


def test_an_exact_name_wins_over_its_pattern() -> None:
    assert PLAN.split_of("a.3.w.weight") is PLAN.params["a.3.w.weight"]
    assert PLAN.split_of("a.4.w.weight") is PLAN.params["a.*.w.weight"]
    assert PLAN.split_of("b.4.w.weight") is None


def test_only_whole_numeric_components_become_stars() -> None:
    assert pattern_of("h.10.fc1.weight") == "h.*.fc1.weight"
    assert pattern_of("dense_4h_to_h") == "dense_4h_to_h"


@pytest.mark.parametrize(
    "change",
    [
        {"version": 99},
        {"version": None},
        {"params": {"x": {"op": "column"}}},
        {"params": {"x": {**PLAN.params["a.*.w.weight"].to_dict(), "op": "diagonal"}}},
        {"params": {"x": {**PLAN.params["a.*.w.weight"].to_dict(), "ranges": [[[3, 1]]]}}},
        {"patches": None},
        {"tp": "many"},
    ],
)
def test_damaged_data_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        Plan.from_dict({**PLAN.to_dict(), **change})


@given(st.integers(0, 500), st.integers(1, 40))
def test_even_ranges_cover_everything_once_and_differ_by_one_at_most(size: int, ranks: int) -> None:
    parts = even_ranges(size, ranks)
    indices = [index for ((start, stop),) in parts for index in range(start, stop)]
    assert indices == list(range(size))
    lengths = [total(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1


def test_importing_the_plan_imports_no_torch() -> None:
    code = "import sys, shoal.plan, shoal.plan.types; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
