"""Brings ranks back that failed: the whole group is started anew, on a thread of its own, with a growing
pause while that does not help; too many failures are the end. Knows no request and no step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from shoal.errors import EngineDeadError, RankError
from shoal.worker.executor import Executor

__all__ = ["RestartPolicy", "Supervisor"]

_events = logging.getLogger("shoal.events")

_FIRST_PAUSE_S = 0.5  # before the second start in a row; the first follows the failure at once
_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How many failures are borne."""

    max_restarts: int = 0  # starts within ``window_s``; one more failure, and the engine has failed
    window_s: float = 300.0


class Supervisor:
    """Restarts one executor's ranks. All but :meth:`wait` is for the thread that steps.

    Args:
        executor: has loaded; while :attr:`is_recovering`, nobody else calls it.
    """

    def __init__(
        self, executor: Executor, policy: RestartPolicy, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.on_ended: Callable[[], None] = lambda: None
        """Called on the helper thread when a recovery has ended, either way."""
        self.num_restarts = 0
        self._executor = executor
        self._policy = policy
        self._clock = clock
        self._starts: deque[float] = deque()  # when starts that count began, within the window
        self._num_fruitless = 0  # starts since the last answered step
        self._is_recovering = False
        self._problem: EngineDeadError | None = None
        self._ended = threading.Event()
        self._ended.set()  # nothing is under way
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_recovering(self) -> bool:
        """The ranks failed, and :meth:`poll` has not found them back yet."""
        return self._is_recovering

    def lose(self, cause: BaseException, *, is_counted: bool = True) -> None:
        """The ranks have failed: begin to start them anew.

        Args:
            cause: what happened.
            is_counted: whether the start counts towards ``max_restarts``.

        Raises:
            EngineDeadError: that happened too often, or the ranks are not ours to start.
        """
        assert not self._is_recovering
        if not self._executor.is_replaceable:
            raise EngineDeadError(
                f"the engine has failed: {cause} (and ranks that are not ours cannot be started anew)"
            ) from cause
        pause_s = self._next_pause(cause) if is_counted else 0.0
        self._is_recovering = True
        self._ended.clear()
        self._thread = threading.Thread(
            target=self._recover, args=(pause_s,), name="shoal-supervisor", daemon=True
        )
        self._thread.start()

    def poll(self) -> bool:
        """Whether the ranks serve now.

        Raises:
            EngineDeadError: they could not be brought back.
        """
        if self._is_recovering and self._ended.is_set():
            if self._problem is not None:
                raise self._problem
            self._is_recovering = False
        return not self._is_recovering

    def look(self) -> RankError | None:
        """For moments without a step: see whether the ranks are there again, or still there.

        Returns:
            why they are not, if that is new.

        Raises:
            EngineDeadError: they could not be brought back.
        """
        if self._is_recovering:
            self.poll()
            return None
        try:
            self._executor.check()
        except RankError as error:
            return error
        return None

    def interrupted(self) -> None:
        """After an exception from outside in the middle of a step: new ranks, if these cannot go on.

        Raises:
            EngineDeadError: they cannot, and cannot be started again either.
        """
        if not (self._executor.is_interruptible or self._is_recovering):
            self.lose(RankError("the ranks were interrupted in the middle of a step"), is_counted=False)

    def wait(self, timeout_s: float) -> None:
        """Return when the recovery under way has ended, or after ``timeout_s`` seconds."""
        self._ended.wait(timeout_s)

    def worked(self) -> None:
        """A step was answered."""
        self._num_fruitless = 0

    def stop(self) -> None:
        """End a recovery under way; returns when nothing of it runs any more."""
        self._stopping.set()
        if self._thread is not None and self._thread.is_alive():
            self._executor.interrupt()
            self._thread.join()

    def _next_pause(self, cause: BaseException) -> float:
        """Seconds to wait before the next start; it is counted."""
        now, policy = self._clock(), self._policy
        while self._starts and self._starts[0] < now - policy.window_s:
            self._starts.popleft()
        if len(self._starts) >= policy.max_restarts:
            raise EngineDeadError(
                f"the engine has failed: {cause} (max_restarts: {policy.max_restarts} within "
                f"{policy.window_s:g} s)"
            ) from cause
        self._starts.append(now)
        pause_s = _FIRST_PAUSE_S * 2 ** (self._num_fruitless - 1) if self._num_fruitless else 0.0
        self._num_fruitless += 1
        return min(pause_s, _LONGEST_PAUSE_S)

    # On the helper thread

    def _recover(self, pause_s: float) -> None:
        try:
            while not self._stopping.wait(pause_s):
                cause = self._start()
                if cause is None:
                    break
                if not self._stopping.is_set():
                    pause_s = self._next_pause(cause)
        except EngineDeadError as error:
            self._problem = error
        finally:
            self._ended.set()
            self.on_ended()

    def _start(self) -> Exception | None:
        """Start the ranks; why they did not start, if so."""
        started = self._clock()
        try:
            self._executor.reload()
        except Exception as error:  # whatever it is, it is what the next start or the end is told of
            _events.warning("restart failed after %.1f s: %s", self._clock() - started, error)
            return error
        self.num_restarts += 1
        _events.info(
            "restart %d: the ranks serve again after %.1f s", self.num_restarts, self._clock() - started
        )
        return None
