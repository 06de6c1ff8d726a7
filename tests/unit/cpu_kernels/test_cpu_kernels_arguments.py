"""How words reach a job, and tensors become rows."""

from __future__ import annotations

import pytest
import torch

from shoal.cpu_kernels.arguments import argument, argument_float, float_bits, output, rows_of, run_job
from shoal.cpu_kernels.memory import store_float32
from shoal.jit.compile import kernel
from shoal.jit.team import Team


@kernel
def _write_job(index: int, count: int, words: int) -> int:
    store_float32(argument(words, 0), index, argument_float(words, 1) + index)
    return argument(words, 2)


def test_ints_and_floats_arrive_at_every_participant(pair: Team) -> None:
    out = torch.zeros(2)
    run_job(pair, _write_job, out.data_ptr(), float_bits(-1.25), 0)
    assert out.tolist() == [-1.25, -0.25]


def test_a_status_other_than_zero_is_raised(team: Team) -> None:
    out = torch.zeros(2)
    with pytest.raises(RuntimeError, match="status 5"):
        run_job(team, _write_job, out.data_ptr(), float_bits(0.0), 5)


def test_rows_are_a_view_where_there_is_one() -> None:
    x = torch.randn(4, 10)
    assert rows_of(x[:, 2:7], 5, "x").data_ptr() == x[:, 2:].data_ptr()
    assert torch.equal(rows_of(x.T, 4, "x"), x.T)
    assert rows_of(torch.randn(3), 3, "x").shape == (1, 3)


def test_an_output_is_made_or_taken_as_it_is() -> None:
    assert output(None, 2, 3).shape == (2, 3)
    wide = torch.empty(2, 5)
    assert output(wide[:, :3], 2, 3).data_ptr() == wide.data_ptr()
    with pytest.raises(ValueError, match="out"):
        output(torch.empty(2, 3, dtype=torch.float64), 2, 3)
