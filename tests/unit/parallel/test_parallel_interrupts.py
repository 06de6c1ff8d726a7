"""A Ctrl-C waits for the end of a call; a second one does not."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from shoal.parallel.interrupts import interrupts_wait


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_comes_through_at_the_end() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        interrupt()
        done = True
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_comes_through_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        interrupt()
        interrupt()
        pytest.fail("it went on")


def test_other_threads_are_left_alone() -> None:
    seen = []

    def body() -> None:
        with interrupts_wait():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
