"""Several jobs in one run of the team."""

from __future__ import annotations

import numpy
import pytest
import torch

from shoal.cpu_kernels.arguments import argument
from shoal.cpu_kernels.layout import pack
from shoal.cpu_kernels.linear import PackedLinear, linear_job
from shoal.cpu_kernels.program import Operation, Program
from shoal.jit.compile import kernel
from shoal.jit.team import Team


def chain(weights: list[torch.Tensor], buffers: list[torch.Tensor], rows: int) -> list[Operation]:
    """Linear layers, each reading what the one before wrote."""
    operations = []
    for weight, x, y in zip(weights, buffers[:-1], buffers[1:], strict=True):
        packed = pack(weight)
        words = [rows, packed.address, x.data_ptr(), 4 * x.stride(0), 0, 0, 0, y.data_ptr(), 4 * y.stride(0)]
        operations.append(Operation(linear_job, numpy.array(words, numpy.int64), holds=(packed,)))
    return operations


def test_operations_see_what_those_before_them_wrote(team: Team, pair: Team) -> None:
    weights = [torch.randn(64, 64) / 8 for _ in range(20)]
    for threads in (team, pair):
        buffers = [torch.randn(5, 64) for _ in range(21)]
        program = Program(chain(weights, buffers, 5), threads)
        for _ in range(20):
            buffers[0].normal_()
            program.run()
            expected = buffers[0]
            for weight in weights:
                expected = PackedLinear(pack(weight), team)(expected)
            assert torch.equal(buffers[-1], expected)


def test_words_may_change_between_runs(pair: Team) -> None:
    weights, buffers = [torch.randn(16, 16)], [torch.randn(5, 16), torch.zeros(5, 16)]
    operations = chain(weights, buffers, 2)
    program = Program(operations, pair)
    program.run()
    assert buffers[1].any(-1).tolist() == [True, True, False, False, False]
    operations[0].words[0] = 4
    program.run()
    assert buffers[1].any(-1).tolist() == [True, True, True, True, False]


@kernel
def _failing_job(index: int, count: int, words: int) -> int:
    return argument(words, 0) if index == count - 1 else 0


def test_a_job_that_fails_ends_the_program_with_its_status(pair: Team) -> None:
    failing = Operation(_failing_job, numpy.array([7], numpy.int64))
    with pytest.raises(RuntimeError, match="status 7"):
        Program([failing, failing], pair).run()
    passing = Operation(_failing_job, numpy.array([0], numpy.int64))
    Program([passing, passing], pair).run()


def test_words_of_another_kind_are_refused(team: Team) -> None:
    with pytest.raises(ValueError, match="contiguous int64"):
        Program([Operation(_failing_job, numpy.array([7.0]))], team)  # type: ignore[arg-type]
