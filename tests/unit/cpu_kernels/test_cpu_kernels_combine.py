"""Sums of values with factors, and norms of heads as a job, agree with torch."""

from __future__ import annotations

import pytest
import torch

from shoal.cpu_kernels.arguments import float_bits, run_job
from shoal.cpu_kernels.combine import MOST_TERMS, combine_job
from shoal.cpu_kernels.norm import head_norm_job
from shoal.jit.team import Team

ROWS, WIDTH = 5, 19


def combine(team: Team, out: torch.Tensor, terms: list[tuple[torch.Tensor, float]]) -> None:
    words: list[int] = [ROWS, WIDTH, out.data_ptr(), 4 * out.stride(0), len(terms)]
    for value, factor in terms:
        words += [value.data_ptr(), 4 * value.stride(0), float_bits(factor)]
    run_job(team, combine_job, *words, *([0] * (3 * (MOST_TERMS - len(terms)))))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("threads", ["team", "pair"])
def test_values_are_added_with_their_factors(
    count: int, threads: str, request: pytest.FixtureRequest
) -> None:
    values = [torch.randn(ROWS, WIDTH) for _ in range(count)]
    factors = [1.0, -0.5, 2.5][:count]
    out = torch.full((ROWS, WIDTH), float("nan"))
    combine(request.getfixturevalue(threads), out, list(zip(values, factors, strict=True)))
    assert torch.allclose(out, sum(f * v for v, f in zip(values, factors, strict=True)), atol=1e-6)


def test_the_result_may_replace_a_value_and_rows_may_lie_apart(team: Team) -> None:
    wide, other = torch.randn(ROWS, WIDTH + 4), torch.randn(ROWS, WIDTH)
    before = wide.clone()
    part = wide[:, :WIDTH]
    combine(team, part, [(part, 2.0), (other, 1.0)])
    assert torch.allclose(part, 2 * before[:, :WIDTH] + other, atol=1e-6)
    assert torch.equal(wide[:, WIDTH:], before[:, WIDTH:])


def test_heads_are_normed_each_by_itself_in_place(team: Team) -> None:
    heads, width = 3, 8
    x, weight, bias = torch.randn(ROWS, heads * width), torch.randn(width), torch.randn(width)
    expected = torch.nn.functional.layer_norm(x.view(ROWS, heads, width), (width,), weight, bias, 1e-5)
    run_job(
        team, head_norm_job, ROWS, x.data_ptr(), 4 * x.stride(0), heads, width, weight.data_ptr(),
        bias.data_ptr(), 1, float_bits(1e-5),
    )  # fmt: skip
    assert torch.allclose(x.view(ROWS, heads, width), expected, atol=1e-5)
