"""Faults on purpose, for tests of what follows them. Knows no model and no engine.

``SHOAL_FAULT`` in a rank's environment says what happens where, as in ``raise@1:40,hang@0:100``: rank 1
raises in step 40, rank 0 hangs in step 100. Instead of a step, ``token=7`` stands for every step that
computes that token, so that a request can be made to fail wherever it runs; and ``signal`` for whatever the
rank is to do next, a step or a sign of life, once it was sent SIGUSR1.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.messages import Ping, Step, unpack_ids

__all__ = ["VARIABLE", "Faults"]

VARIABLE = "SHOAL_FAULT"

_log = logging.getLogger("shoal.worker")

_FORM = re.compile(r"(raise|memory|hang|exit)@(\d+):(?:(\d+)|token=(\d+)|signal)")
_EXIT_STATUS = 70


@dataclass(frozen=True, slots=True)
class _Fault:
    kind: str
    step_id: int | None
    token_id: int | None

    def is_due(self, message: Step | Ping, has_signal: bool) -> bool:
        if self.step_id is None and self.token_id is None:
            return has_signal
        if isinstance(message, Ping):
            return False
        if self.token_id is None:
            return message.step_id == self.step_id
        return any(self.token_id in unpack_ids(sequence.token_ids) for sequence in message.sequences)


class Faults:
    """One rank's."""

    def __init__(self, faults: list[_Fault]) -> None:
        self._faults = faults
        self._signalled = threading.Event()
        if any(fault.step_id is None and fault.token_id is None for fault in faults):
            signal.signal(signal.SIGUSR1, lambda *_: self._signalled.set())

    @classmethod
    def of_rank(cls, rank: int, environment: Mapping[str, str] = os.environ) -> Faults:
        """What the environment asks of ``rank``.

        Raises:
            ConfigError: it asks for what is no fault.
        """
        faults = []
        for words in filter(None, environment.get(VARIABLE, "").split(",")):
            match = _FORM.fullmatch(words)
            if match is None:
                raise ConfigError(f"{VARIABLE}: {words!r} is not of the form raise@RANK:STEP", field=VARIABLE)
            kind, of, step, token = match.groups()
            if int(of) == rank:
                faults.append(_Fault(kind, _number(step), _number(token)))
        return cls(faults)

    def before(self, message: Step | Ping) -> None:
        """Fail now, if that is asked for in ``message``; the log says at which moment."""
        for fault in self._faults:
            if fault.is_due(message, self._signalled.is_set()):
                _log.warning("%s: %s at %.3f", VARIABLE, fault.kind, time.time())
                _fail(fault.kind)


def _number(digits: str | None) -> int | None:
    return None if digits is None else int(digits)


def _fail(kind: str) -> None:
    if kind == "exit":
        os._exit(_EXIT_STATUS)
    if kind == "hang":
        threading.Event().wait()
    if kind == "memory":
        raise MemoryError(f"asked for by {VARIABLE}")
    raise RuntimeError(f"asked for by {VARIABLE}")
