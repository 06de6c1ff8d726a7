"""Memory given its pages in the background: all of it, while it is written to, or no more once stopped."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from shoal.device import backing
from shoal.device.backing import Backing
from shoal.device.huge import HugeRegion

pytestmark = pytest.mark.skipif(not Backing.is_possible(), reason="the system makes no pages ahead of use")

MIB = 1 << 20


def resident(tensor: torch.Tensor) -> int:
    """Bytes of the mapping that ``tensor`` lies in which have pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            low, high = (int(part, 16) for part in name.split("-"))
            inside = low <= tensor.data_ptr() < high
        elif inside and name == "Rss:":
            return 1024 * int(rest.split()[0])
    raise AssertionError("no such mapping")


def test_all_pages_come_and_what_is_there_stays() -> None:
    region = HugeRegion(48 * MIB)
    whole, half = region.take((32 * MIB,), torch.uint8), region.take((16 * MIB,), torch.uint8)
    whole[:1000] = 7
    later = Backing()
    for tensor in (whole[5:], half):
        later.add(tensor)
    assert later.num_bytes == 48 * MIB - 5
    assert resident(whole) < 8 * MIB
    later.start()
    whole[-1000:] = 9  # in use meanwhile
    later.wait()
    assert resident(whole) >= 48 * MIB
    assert whole.sum() == 7 * 1000 + 9 * 1000 and not half.any()
    later.stop()


def test_it_is_out_of_the_way_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        backing,
        "_populate",
        lambda *_: seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())) or 0,
    )
    later = Backing()
    later.add(torch.empty(8 * MIB, dtype=torch.uint8))
    later.start()
    later.wait()
    assert seen == [19] * 4
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19


def test_one_that_is_stopped_begins_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def populate(start: int, end: int) -> int:
        calls.append(end - start)
        begun.set()
        go_on.wait()
        return 0

    monkeypatch.setattr(backing, "_populate", populate)
    later = Backing()
    later.add(torch.empty(64 * MIB, dtype=torch.uint8))
    later.start()
    begun.wait()
    later._is_wanted = False  # as stop() does before it waits
    go_on.set()
    later.stop()
    assert calls == [2 * MIB]


def test_one_that_was_never_started_stops() -> None:
    later = Backing()
    later.add(torch.empty(MIB, dtype=torch.uint8))
    later.stop()


def test_what_the_system_refuses_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backing, "_populate", lambda *_: 12)
    later = Backing()
    later.add(torch.empty(64 * MIB, dtype=torch.uint8))
    with caplog.at_level("WARNING", logger="shoal.device"):
        later.start()
        later.wait()
    assert len(caplog.records) == 1 and os.strerror(12) in caplog.text


def test_other_systems_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not Backing.is_possible()
