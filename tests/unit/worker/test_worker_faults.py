"""Faults happen where they are asked for, and nowhere else."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from shoal.errors import ConfigError
from shoal.messages import Ping
from shoal.worker.faults import VARIABLE, Faults
from support.loads import make_step


def faults(words: str, rank: int = 1) -> Faults:
    return Faults.of_rank(rank, {VARIABLE: words})


def test_without_being_asked_for_nothing_happens() -> None:
    Faults.of_rank(0, {}).before(make_step(1, (0, [5])))
    faults("raise@0:7").before(make_step(7, (0, [5])))


def test_a_rank_fails_in_the_step_it_is_told_to() -> None:
    asked = faults("raise@1:7,memory@1:9")
    asked.before(make_step(8, (0, [7])))
    with pytest.raises(RuntimeError, match="SHOAL_FAULT"):
        asked.before(make_step(7, (0, [5])))
    with pytest.raises(MemoryError):
        asked.before(make_step(9, (0, [5])))


def test_a_rank_fails_in_every_step_with_the_token() -> None:
    asked = faults("raise@1:token=77")
    asked.before(make_step(77, (0, [5])))
    for step in (1, 2):
        with pytest.raises(RuntimeError):
            asked.before(make_step(step, (0, [5]), (4, [76, 77])))


def test_a_rank_that_is_sent_a_signal_fails_at_whatever_comes_next() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    try:
        asked = faults("raise@1:signal")
        asked.before(make_step(7, (0, [5])))
        asked.before(Ping())
        signal.raise_signal(signal.SIGUSR1)
        for message in (Ping(), make_step(8, (0, [5]))):
            with pytest.raises(RuntimeError, match="SHOAL_FAULT"):
                asked.before(message)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_sign_of_life_is_no_step() -> None:
    faults("raise@1:7,raise@1:token=5").before(Ping())


def test_a_hanging_rank_never_comes_back() -> None:
    hanging = threading.Thread(target=faults("hang@1:7").before, args=(make_step(7, (0, [5])),), daemon=True)
    hanging.start()
    hanging.join(0.2)
    assert hanging.is_alive()


def test_a_rank_that_exits_takes_its_process_along() -> None:
    program = "from shoal.worker.faults import _fail; _fail('exit'); print('still here')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (70, b"")


@pytest.mark.parametrize("words", ["raise", "raise@1", "explode@1:7", "raise@1:x", "raise@1:7;raise@1:8"])
def test_what_is_no_fault_is_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="SHOAL_FAULT"):
        faults(words)
