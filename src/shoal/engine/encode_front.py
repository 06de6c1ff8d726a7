"""Runs a job of an encoder on the engine's thread, for asyncio: its texts share steps with everybody else's.
Knows no task and no HTTP.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from typing import Any

from shoal.engine.encode_core import EncodeDelta
from shoal.engine.encode_tasks import Job, Output
from shoal.engine.encode_types import Encoding
from shoal.engine.loop import EngineLoop, Sink
from shoal.engine.mailbox import Mailbox
from shoal.errors import EngineError, ShoalError

__all__ = ["run_job_async"]

_Item = tuple[int, EncodeDelta | ShoalError | None]  # of which text


def _sink(
    mailbox: Mailbox[Any], events: asyncio.AbstractEventLoop, arrived: asyncio.Queue[_Item], index: int
) -> Sink:
    def sink(item: EncodeDelta | ShoalError | None) -> None:
        mailbox.post(events, arrived, (index, item))

    return sink


def _taken(index: int, item: EncodeDelta | ShoalError | None) -> Encoding | None:
    """What a text got; None: it was let in."""
    if item is None:
        return None
    if isinstance(item, ShoalError):
        raise item
    if item.encoding is None:
        raise EngineError(f"text {index} failed: {item.error}")
    return item.encoding


async def run_job_async(loop: EngineLoop, mailbox: Mailbox[Any], job: Job[Output]) -> list[Output]:
    """What the job's texts get, in their order. A cancelled call takes its texts back.

    If the first is let in, so are the others, however many: no queue refuses a call for its size.

    Raises:
        QueueFullError: too many texts wait already.
        EngineError: a text failed.
        EngineDeadError: the engine has given up.
    """
    events, arrived = asyncio.get_running_loop(), asyncio.Queue[_Item]()
    found: dict[int, Encoding] = {}
    waiting: dict[int, tuple[str, Sink]] = {}
    try:
        for index, (token_ids, params) in enumerate(job.inputs):
            request_id, sink = waiting[index] = uuid.uuid4().hex, _sink(mailbox, events, arrived, index)
            loop.submit(request_id, token_ids, replace(params, follows=index > 0), sink)
            if index == 0:
                _taken(*await arrived.get())
        while waiting:
            index, item = await arrived.get()
            encoding = _taken(index, item)
            if encoding is not None:
                found[index] = encoding
                del waiting[index]
    finally:
        for request_id, sink in waiting.values():
            loop.abort(request_id, sink)
    return job.finish([found[index] for index in range(len(found))])
