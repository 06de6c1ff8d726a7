"""A team runs every part of a job, once, and its threads end with it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest

from shoal.jit.barrier import meet
from shoal.jit.compile import kernel
from shoal.jit.team import Team, aligned_zeros, job_address
from shoal.jit.views import array_at
from shoal.jit.waiting import COUNTER_BYTES, FOREVER


@kernel
def mark(index: int, count: int, arguments: int) -> int:
    """Adds 100 * count + index to the participant's word."""
    words = array_at(arguments, count, numpy.int64)
    words[index] += 100 * count + index
    return 0


@kernel
def fail(index: int, count: int, arguments: int) -> int:
    return index * array_at(arguments, 1, numpy.int64)[0]


@kernel
def prefix_sums(index: int, count: int, arguments: int) -> int:
    """Rounds of [write my word, meet, read all words, meet]; the sum of what was read comes out."""
    barrier, spin_ns = array_at(arguments, 2, numpy.int64)[0], array_at(arguments, 2, numpy.int64)[1]
    words = array_at(arguments + 16, count, numpy.int64)
    sums = array_at(arguments + 16 + 8 * count, count, numpy.int64)
    for turn in range(100):
        words[index] = turn * (index + 1)
        status = meet(barrier, count, 2 * turn, spin_ns, FOREVER)
        if status != 0:
            return status
        for other in range(count):
            sums[index] += words[other]
        status = meet(barrier, count, 2 * turn + 1, spin_ns, FOREVER)
        if status != 0:
            return status
    return 0


@kernel
def leave_alone(index: int, count: int, arguments: int) -> int:
    """Participant 0 fails while the others wait for it."""
    if index == 0:
        return 7
    return meet(arguments, count, 0, 0, FOREVER)


@kernel
def wrong(index: int, count: int, arguments: int) -> float:
    return 0.5


def run_often(team: Team, times: int) -> list[int]:
    words = numpy.zeros(team.num_threads, numpy.int64)
    for _ in range(times):
        assert team.run(mark, int(words.ctypes.data)) == 0
    return words.tolist()


def expected(count: int, times: int) -> list[int]:
    return [times * (100 * count + index) for index in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_every_part_runs_once_a_run_however_many_cores_there_are(count: int) -> None:
    team = Team(count)
    assert run_often(team, 300) == expected(count, 300)
    team.close()


@pytest.mark.parametrize("spin_ns", [0, 20_000])
def test_a_team_that_went_to_sleep_wakes_for_the_next_job(spin_ns: int) -> None:
    team = Team(2, spin_ns=spin_ns)
    assert run_often(team, 3) == expected(2, 3)
    sleepers = numpy.frombuffer(team._area, numpy.int64)[1:2]
    while sleepers[0] == 0:
        threading.Event().wait(0.001)
    assert run_often(team, 3) == expected(2, 3)
    team.close()


def test_parts_of_a_job_can_meet_and_a_run_begins_anew() -> None:
    team = Team(3)
    memory = numpy.zeros(8, numpy.int64)
    for _ in range(3):
        memory[:] = [team.barrier_address, team.spin_ns, 0, 0, 0, 0, 0, 0]
        assert team.run(prefix_sums, int(memory.ctypes.data)) == 0
        assert memory[5:].tolist() == [6 * sum(range(100))] * 3
    team.close()


def test_the_status_of_the_lowest_failing_part_comes_back_and_the_team_goes_on() -> None:
    team = Team(3)
    factor = numpy.array([5], numpy.int64)
    assert team.run(fail, int(factor.ctypes.data)) == 5
    assert team.run(leave_alone, team.barrier_address) == 7
    assert run_often(team, 2) == expected(3, 2)
    team.close()


def test_two_teams_at_once_do_not_disturb_each_other() -> None:
    teams = [Team(2), Team(3)]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run_often, teams, [200, 200]))
    assert results == [expected(2, 200), expected(3, 200)]
    for team in teams:
        team.close()


def test_threads_that_share_a_team_take_turns() -> None:
    team = Team(2)
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(run_often, [team] * 3, [50] * 3))
    assert results == [expected(2, 50)] * 3
    team.close()


def test_close_ends_the_threads_and_so_does_forgetting_the_team() -> None:
    team = Team(3)
    mine = team._threads
    assert all(thread.is_alive() for thread in mine)
    team.close()
    team.close()
    assert not any(thread.is_alive() for thread in mine)
    with pytest.raises(ValueError, match="closed"):
        team.run(mark, 0)
    forgotten = Team(2)
    mine = forgotten._threads
    del forgotten, team
    gc.collect()
    assert not any(thread.is_alive() for thread in mine)


def test_a_program_that_closes_nothing_ends() -> None:
    code = "from shoal.jit.team import Team; team = Team(3); print('made')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "made\n", "")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no threads")
def test_threads_are_pinned_to_their_cores_and_the_caller_is_left_alone() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    team = Team(2, cpus=[core, core])
    run_often(team, 1)
    native = team._threads[0].native_id
    assert native is not None
    assert os.sched_getaffinity(native) == {core}
    assert os.sched_getaffinity(0) == before
    team.close()


def test_wrong_numbers_and_jobs_without_a_status_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Team(0)
    with pytest.raises(ValueError, match="one a thread"):
        Team(2, cpus=[0])
    with pytest.raises(TypeError, match="int64 status"):
        job_address(wrong)


def test_memory_for_counters_begins_at_a_cache_line() -> None:
    for size in (1, 64, 100):
        memory = aligned_zeros(size)
        assert memory.ctypes.data % COUNTER_BYTES == 0
        assert memory.size == size
        assert not memory.any()
