"""Runs a job of an encoder from start to end, on the caller's thread. Knows no task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shoal.engine.encode_core import EncodeCore, EncodeDelta
from shoal.engine.encode_tasks import Job, Output
from shoal.engine.encode_types import Encoding
from shoal.errors import EngineError

__all__ = ["run_job"]


def run_job(
    core: EncodeCore, job: Job[Output], step: Callable[[], list[EncodeDelta]], show: Callable[[int], None]
) -> list[Output]:
    """What the job's texts get, in their order.

    Texts of like length go together, so that a way that pads wastes little.

    Args:
        core: that nobody else steps.
        step: steps it.
        show: called with the number of texts done so far.

    Raises:
        QueueFullError: too many texts wait already.
        EngineError: a text failed.
    """
    order = sorted(range(len(job.inputs)), key=lambda index: len(job.inputs[index][0]), reverse=True)
    found: dict[str, Encoding] = {}
    failed: str | None = None
    try:
        for index in order:
            token_ids, params = job.inputs[index]
            core.submit(str(index), token_ids, replace(params, follows=index != order[0]))
        while core.has_work:
            for delta in step():
                if delta.encoding is None:
                    failed = delta.error
                else:
                    found[delta.request_id] = delta.encoding
            show(len(found))
    except BaseException:
        for index in order:
            core.abort(str(index))
        raise
    if failed is not None:
        raise EngineError(f"{len(order) - len(found)} of {len(order)} texts failed: {failed}")
    return job.finish([found[str(index)] for index in range(len(order))])
