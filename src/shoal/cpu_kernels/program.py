"""A list of jobs run as one: a whole layer, or a whole model, in one call of the team. Knows no job.

A program is a table of int64 words, three to an operation: the job's machine address, the address of its
words, and whether all participants meet after it (an operation that reads nothing another participant wrote
since the last meeting needs no meeting before it). All words stay where they are from run to run; what
changes, the number of rows, is written into them in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from shoal.cpu_kernels.arguments import argument, run_job
from shoal.cpu_kernels.emit import instruction
from shoal.jit.barrier import meet
from shoal.jit.compile import kernel
from shoal.jit.team import Job, Team, job_address
from shoal.jit.waiting import FOREVER

__all__ = ["Operation", "Program", "program_job"]

_WORDS_EACH = 3
_I64 = ir.IntType(64)


@intrinsic  # type: ignore[untyped-decorator]
def _call_job(typing: Any, address: Any, index: Any, count: Any, words: Any) -> Any:
    """``_call_job(address, index, count, words) -> int64``"""

    def emit(builder: Any, a: Any) -> Any:
        function = builder.inttoptr(a[0], ir.FunctionType(_I64, [_I64] * 3).as_pointer())
        return builder.call(function, a[1:])

    return instruction(types.int64(*[types.int64] * 4), emit)


@kernel(fastmath=False)
def program_job(index: int, count: int, words: int) -> int:
    """Run a program; words: its table, operations in it, the team's barrier, its spin_ns.

    Returns:
        0, or the status of the operation that failed.
    """
    table, operations = argument(words, 0), argument(words, 1)
    passed = 0
    for operation in range(operations):
        place = operation * _WORDS_EACH
        status: int = _call_job(argument(table, place), index, count, argument(table, place + 1))
        if status != 0:
            return status
        if argument(table, place + 2) != 0:
            if meet(argument(words, 2), count, passed, argument(words, 3), FOREVER) != 0:
                return 0  # the participant that failed, and so did not come, says why
            passed += 1
    return 0


@dataclass(frozen=True, eq=False)
class Operation:
    """One job with its words, which may be changed in place between runs."""

    job: Job
    words: NDArray[numpy.int64]
    is_followed_by_meeting: bool = True
    holds: tuple[object, ...] = ()  # kept alive: what the words are addresses of


class Program:
    """Operations run in order by a team, all participants in step.

    Args:
        operations: their words must be contiguous int64; the program holds on to them.
        team: whose threads compute.

    Raises:
        ValueError: words of another kind.
    """

    def __init__(self, operations: Sequence[Operation], team: Team) -> None:
        for operation in operations:
            if operation.words.dtype != numpy.int64 or not operation.words.flags.c_contiguous:
                raise ValueError("an operation's words: contiguous int64")
        self._operations = tuple(operations)
        self._team = team
        self._table = numpy.array(
            [
                (job_address(operation.job), operation.words.ctypes.data, operation.is_followed_by_meeting)
                for operation in operations
            ],
            numpy.int64,
        ).reshape(-1, _WORDS_EACH)
        self._address = int(self._table.ctypes.data)

    def run(self) -> None:
        """Run all operations once.

        Raises:
            RuntimeError: an operation gave a status other than 0.
        """
        team = self._team
        run_job(team, program_job, self._address, len(self._operations), team.barrier_address, team.spin_ns)
