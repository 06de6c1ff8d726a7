"""The engine's thread: takes commands in, steps the core while there is work, hands deltas out. Knows no
asyncio; a sink is any callable.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from shoal.engine.core import EngineCore
from shoal.engine.outputs import RequestDelta
from shoal.engine.protocol import EngineStats
from shoal.errors import EngineDeadError, ShoalError
from shoal.sampling_params import SamplingParams

__all__ = ["EngineLoop", "Sink"]

_log = logging.getLogger("shoal.engine")

Sink = Callable[[RequestDelta | ShoalError | None], None]
"""Called on the engine's thread: None when the request is taken in, then its deltas; or an error, last."""


class EngineLoop:
    """Runs a core on a thread of its own. Its public methods may be called from any thread."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._sinks: dict[str, Sink] = {}
        self._stopping = False
        self._cause: Exception | None = None
        self._stats = core.stats()
        self._thread = threading.Thread(target=self._run, name="shoal-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Requests are still being served."""
        return self._cause is None and self._thread.is_alive()

    @property
    def num_open(self) -> int:
        """Requests not answered to the end yet."""
        return len(self._sinks)

    def stats(self) -> EngineStats:
        """As of the last step."""
        return self._stats

    def submit(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, sink: Sink) -> None:
        """Have a request served; everything about it, refusals too, goes to ``sink``."""

        def take() -> None:
            try:
                self._core.submit(request_id, prompt_ids, params)
            except ShoalError as error:
                sink(error)
                return
            self._sinks[request_id] = sink
            sink(None)

        if not self._post(take):
            sink(self._death())

    def abort(self, request_id: str) -> None:
        """Forget a request; its sink is not called again."""

        def drop() -> None:
            self._sinks.pop(request_id, None)
            self._core.abort(request_id)

        self._post(drop)

    def stop(self) -> None:
        """Stop stepping, answer everyone who still waits, stop the ranks. Returns when done."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _post(self, command: Callable[[], None]) -> bool:
        with self._wake:
            if self._stopping or not self.is_alive:
                return False
            self._commands.append(command)
            self._wake.notify()
            return True

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                for delta in self._core.step():
                    self._deliver(delta)
                self._stats = self._core.stats()
        except Exception as error:  # the thread's boundary: whatever it is, every waiter is answered
            _log.exception("the engine failed")
            self._cause = error
        finally:
            self._end()

    def _wait_for_work(self) -> bool:
        """Take the commands in; False when it is time to stop."""
        while True:
            with self._wake:
                while not (self._commands or self._stopping or self._core.has_work):
                    self._wake.wait()
                commands, self._commands = self._commands, deque()
                if self._stopping:
                    return False
            for command in commands:
                command()
            self._stats = self._core.stats()
            if self._core.has_work:
                return True

    def _deliver(self, delta: RequestDelta) -> None:
        sink = self._sinks.get(delta.request_id)
        if delta.finished:
            self._sinks.pop(delta.request_id, None)
        if sink is not None:
            sink(delta)

    def _end(self) -> None:
        with self._wake:
            self._stopping = True
            commands, self._commands = self._commands, deque()
        for command in commands:  # submissions that came too late: their sinks are answered below
            command()
        for sink in list(self._sinks.values()):
            sink(self._death())
        self._sinks.clear()
        self._core.shutdown()

    def _death(self) -> EngineDeadError:
        if self._cause is None:
            return EngineDeadError("the engine was shut down")
        return EngineDeadError(f"the engine has failed: {self._cause}")
