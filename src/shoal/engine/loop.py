"""The engine's thread: takes commands in, steps the core while there is work, hands deltas out. Knows no
asyncio; a sink is any callable.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from shoal.engine.protocol import EngineStats
from shoal.engine.steps import Core, Delta
from shoal.errors import EngineDeadError, EngineError, ShoalError

__all__ = ["EngineLoop", "Sink"]

_log = logging.getLogger("shoal.engine")
_WATCH_S = 0.2  # how often an idle engine looks whether its ranks live
_MOST_TAKEN = 64  # sequences, between two steps, some 5 ms: who runs doesn't wait for thousands who arrive

Sink = Callable[[Any], None]
"""Called on the engine's thread: None when the request is taken in, then its deltas; or an error, last."""


@dataclass(frozen=True, slots=True)
class _Submission:
    request_id: str
    prompt_ids: Sequence[int]
    params: Any
    sink: Sink


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str
    sink: Sink  # whose request it is: another one of the same name must not suffer


class EngineLoop:
    """Runs a core on a thread of its own. Its public methods may be called from any thread.

    A sink that raises loses its request, and nobody else's.

    Args:
        core: nobody else calls it from now on.
        flush: called once after any number of calls of sinks, on the same thread, for sinks that only
            collect; must not raise.
    """

    def __init__(self, core: Core[Any, Any], flush: Callable[[], None] = lambda: None) -> None:
        self._core = core
        self._flush = flush
        self._wake = threading.Condition()  # guards what is below, up to the sinks
        self._commands: deque[_Submission | _Abort] = deque()
        self._num_open = 0
        self._stopping = False
        self._is_nudged = False  # the ranks are back, or never will be
        self._cause: BaseException | None = None
        self._sinks: dict[str, Sink] = {}  # the engine thread's own
        self._stats = core.stats()
        self.ended: Future[str] = Future()  # why, once everyone was answered
        core.supervisor.on_ended = self._nudge
        self._thread = threading.Thread(target=self._run, name="shoal-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Requests are still being served."""
        return self._cause is None and self._thread.is_alive()

    @property
    def is_ready(self) -> bool:
        """Alive, and the ranks are there."""
        return self.is_alive and not self._core.supervisor.is_recovering

    @property
    def num_open(self) -> int:
        """Requests not answered to the end yet."""
        return self._num_open

    def stats(self) -> EngineStats:
        """As of the last step."""
        return self._stats

    def submit(self, request_id: str, prompt_ids: Sequence[int], params: Any, sink: Sink) -> None:
        """Have a request served; everything about it, refusals too, goes to ``sink``.

        Once the engine has ended, the sink is called here and now, on the caller's thread.
        """
        with self._wake:
            is_taken = self._post(_Submission(request_id, prompt_ids, params, sink))
            self._num_open += is_taken
        if not is_taken:
            sink(self._death())
            self._flush()

    def abort(self, request_id: str, sink: Sink) -> None:
        """Forget the request that was submitted with ``sink``; soon after, the sink is not called again."""
        with self._wake:
            self._post(_Abort(request_id, sink))

    def drain(self, timeout_s: float) -> bool:
        """Wait until no request is open; False if ``timeout_s`` seconds were too few."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._num_open, timeout_s)

    def stop(self) -> None:
        """Stop stepping, answer everyone who still waits, stop the ranks. Returns when done."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if threading.current_thread() is not self._thread:  # a collected engine's finalizer may run there
            self._thread.join()

    def _nudge(self) -> None:
        """Have the engine's thread look up."""
        with self._wake:
            self._is_nudged = True
            self._wake.notify_all()

    def _post(self, command: _Submission | _Abort) -> bool:
        if self._stopping or not self.is_alive:
            return False
        self._commands.append(command)
        self._wake.notify_all()
        return True

    # On the engine's thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._hand_out(self._core.step())
        except BaseException as error:  # the thread's boundary: whatever it is, every waiter is answered
            if not isinstance(error, EngineDeadError):
                _log.exception("the engine failed")
            self._cause = error
        finally:
            self._end()

    def _wait_for_work(self) -> bool:
        """Take commands in; False when it is time to stop."""
        num_taken = 0
        while True:
            while self._has_waited():
                self._hand_out(self._core.check())  # not under the lock: who submits does not wait for it
            with self._wake:
                if self._stopping:
                    return False
                is_due = self._core.can_step and num_taken >= _MOST_TAKEN
                command = self._commands.popleft() if self._commands and not is_due else None
            if command is None:
                return True
            num_taken += self._take(command)
            self._stats = self._core.stats()
            if not self._commands or num_taken >= _MOST_TAKEN:
                self._flush()

    def _has_waited(self) -> bool:
        """Wait a moment for something to do; False, at once, if there is something."""
        with self._wake:
            if self._commands or self._stopping or self._core.can_step:
                return False
            if not self._is_nudged:
                self._wake.wait(_WATCH_S)
            self._is_nudged = False
            return True

    def _take(self, command: _Submission | _Abort) -> int:
        """Obey; returns the work that was, counted in sequences."""
        if isinstance(command, _Submission):
            return self._admit(command)
        if self._sinks.get(command.request_id) is command.sink:
            self._forget(command.request_id)
            self._core.abort(command.request_id)
        return 1

    def _admit(self, new: _Submission) -> int:
        try:
            num_sequences = self._core.submit(new.request_id, new.prompt_ids, new.params)
        except Exception as error:  # nothing has changed, so whatever it is, it is this request's alone
            self._count_answered()
            self._tell(new.sink, error if isinstance(error, ShoalError) else _unexpected(error))
            return 1
        self._sinks[new.request_id] = new.sink
        if not self._tell(new.sink, None):
            self._forget(new.request_id)
            self._core.abort(new.request_id)
        return num_sequences

    def _hand_out(self, deltas: Sequence[Delta]) -> None:
        self._stats = self._core.stats()  # before its deltas: who has seen the end finds it counted
        for delta in deltas:
            self._deliver(delta)
        if deltas:
            self._flush()

    def _deliver(self, delta: Delta) -> None:
        sink = self._sinks.get(delta.request_id)
        if sink is None:
            return
        is_told = self._tell(sink, delta)
        if delta.finished or not is_told:
            self._forget(delta.request_id)
        if not delta.finished and not is_told:
            self._core.abort(delta.request_id)

    def _tell(self, sink: Sink, item: Delta | ShoalError | None) -> bool:
        """Call a sink; whether it took it."""
        try:
            sink(item)
        except Exception:  # a caller's code (or its closed event loop) must not end everybody's engine
            _log.warning("a request's receiver failed; the request is dropped", exc_info=True)
            return False
        return True

    def _forget(self, request_id: str) -> None:
        del self._sinks[request_id]
        self._count_answered()

    def _count_answered(self) -> None:
        with self._wake:
            self._num_open -= 1
            self._wake.notify_all()

    def _end(self) -> None:
        with self._wake:
            self._stopping = True
            late = [command.sink for command in self._commands if isinstance(command, _Submission)]
            self._commands.clear()
        for sink in (*self._sinks.values(), *late):
            self._tell(sink, self._death())
        self._flush()
        self._sinks.clear()
        with self._wake:
            self._num_open = 0
            self._wake.notify_all()
        self._core.shutdown()
        self.ended.set_result(str(self._death()))

    def _death(self) -> EngineDeadError:
        if self._cause is None:
            return EngineDeadError("the engine was shut down")
        if isinstance(self._cause, EngineDeadError):
            return EngineDeadError(str(self._cause))
        return EngineDeadError(f"the engine has failed: {self._cause}")


def _unexpected(error: Exception) -> EngineError:
    _log.error("a request could not be taken in", exc_info=error)
    return EngineError(f"the request could not be taken in: {type(error).__name__}: {error}")
