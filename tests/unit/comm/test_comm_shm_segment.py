"""Memory is shared with whoever is told its path in time, and with nobody else."""

from __future__ import annotations

import ctypes
import gc
import os
import select
import subprocess
import sys
from pathlib import Path

import numpy
import psutil
import pytest

from shoal.comm.shm_segment import Segment, host_identity, watch_process


def bytes_of(segment: Segment, count: int) -> numpy.ndarray:
    return numpy.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(segment.address))


def test_what_one_writes_the_other_reads() -> None:
    segment = Segment.create(8192)
    other = Segment.attach(segment.path, 8192)
    assert other.address != segment.address
    assert not bytes_of(segment, 8192).any()
    bytes_of(segment, 8192)[8191] = 7
    assert bytes_of(other, 8192)[8191] == 7
    segment.hide()


def test_another_process_can_map_it() -> None:
    segment = Segment.create(4096)
    code = (
        "import ctypes, sys; from shoal.comm.shm_segment import Segment;"
        "s = Segment.attach(sys.argv[1], 4096); ctypes.c_uint8.from_address(s.address + 5).value = 9"
    )
    assert subprocess.run([sys.executable, "-c", code, segment.path]).returncode == 0
    assert bytes_of(segment, 4096)[5] == 9
    segment.hide()


def test_once_hidden_it_cannot_be_opened_and_mappings_stay() -> None:
    segment = Segment.create(4096)
    other, path = Segment.attach(segment.path, 4096), segment.path
    segment.hide()
    segment.hide()
    with pytest.raises(OSError):
        Segment.attach(path, 4096)
    bytes_of(segment, 4096)[0] = 3
    assert bytes_of(other, 4096)[0] == 3


def test_nothing_is_listed_in_any_folder_and_no_file_stays_open() -> None:
    shared = Path("/dev/shm")
    process = psutil.Process()
    before = set(shared.iterdir()) if shared.is_dir() else set()
    open_before = process.num_fds()
    segment = Segment.create(4096)
    other = Segment.attach(segment.path, 4096)
    if shared.is_dir():
        assert set(shared.iterdir()) == before
    segment.hide()
    del segment, other
    gc.collect()
    assert process.num_fds() == open_before


def test_memory_that_is_smaller_than_said_or_not_there_is_refused() -> None:
    segment = Segment.create(4096)
    with pytest.raises(OSError, match="not what was to be shared"):
        Segment.attach(segment.path, 8192)
    segment.hide()


def test_the_file_with_a_random_name_is_its_owners_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no anonymous files."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    segment = Segment.create(4096)
    path = Path(segment.path)
    assert path.stat().st_mode & 0o777 == 0o600
    other = Segment.attach(segment.path, 4096)
    bytes_of(segment, 4096)[1] = 4
    assert bytes_of(other, 4096)[1] == 4
    segment.hide()
    assert not path.exists()


def test_processes_of_this_host_have_one_identity() -> None:
    code = "from shoal.comm.shm_segment import host_identity; print(host_identity())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == host_identity()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no file for a process here")
def test_a_process_that_has_ended_is_seen_even_before_its_parent_asks() -> None:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    watch = watch_process(child.pid)
    assert select.select([watch], [], [], 0)[0] == []
    child.kill()
    assert select.select([watch], [], [], 60)[0] == [watch]
    os.close(watch)
    child.communicate()
    with pytest.raises(OSError):
        watch_process(child.pid)
