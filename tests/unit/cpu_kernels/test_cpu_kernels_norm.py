"""Norms against torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from shoal.cpu_kernels.arguments import argument, argument_float, float_bits, run_job
from shoal.cpu_kernels.norm import Norm, head_norm_part
from shoal.jit.compile import kernel
from shoal.jit.team import Team

WIDTHS = (1, 7, 16, 100, 576)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("has_weight", [True, False])
def test_rms_norm_equals_torch(width: int, has_weight: bool, team: Team) -> None:
    x = torch.randn(5, width) * 3
    weight = torch.randn(width) if has_weight else None
    expected = functional.rms_norm(x.double(), [width], None if weight is None else weight.double(), eps=1e-5)
    got = Norm(width, weight, None, 1e-5, team, is_centred=False)(x)
    torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("parameters", [0, 1, 2])
def test_layer_norm_equals_torch(width: int, parameters: int, team: Team) -> None:
    x = torch.randn(5, width) + 100
    given = [torch.randn(width) for _ in range(parameters)]
    weight, bias = (*given, None, None)[:2]
    expected = functional.layer_norm(x.double(), [width], *[tensor.double() for tensor in given], eps=1e-5)
    got = Norm(width, weight, bias, 1e-5, team, is_centred=True)(x)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_norm_may_multiply_by_one_more_than_its_weight(team: Team) -> None:
    x, weight = torch.randn(5, 40), torch.randn(40)
    got = Norm(40, weight, None, 1e-6, team, is_centred=False, adds_one=True)(x)
    expected = functional.rms_norm(x, [40], 1 + weight, eps=1e-6)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=2e-6)


def test_the_residual_sum_is_kept_and_normed(team: Team) -> None:
    x, added, weight = torch.randn(5, 40), torch.randn(5, 40), torch.randn(40)
    total = added.clone()
    norm = Norm(40, weight, None, 1e-6, team, is_centred=False)
    got = norm(x, added=total, total=total)
    assert torch.equal(total, x + added)
    assert torch.equal(got, norm(x + added))


def test_a_row_has_the_same_bits_alone_in_a_batch_and_on_two_threads(team: Team, pair: Team) -> None:
    x, weight, bias = torch.randn(33, 77), torch.randn(77), torch.randn(77)
    norms = [Norm(77, weight, bias, 1e-6, threads, is_centred=True) for threads in (team, pair)]
    whole = norms[0](x)
    assert torch.equal(norms[1](x), whole)
    assert all(torch.equal(norms[1](x[row]), whole[row]) for row in range(33))


def test_a_norm_may_write_over_its_input(team: Team) -> None:
    x, weight = torch.randn(5, 40), torch.randn(40)
    norm = Norm(40, weight, None, 1e-6, team, is_centred=False)
    expected = norm(x)
    norm(x, out=x)
    assert torch.equal(x, expected)


@kernel
def _head_norm_job(index: int, count: int, words: int) -> int:
    x, x_bytes, weight = argument(words, 0), argument(words, 1), argument(words, 2)
    head_norm_part(index, count, x, x_bytes, 6, 3, 20, weight, 0, 0, argument_float(words, 3))
    return 0


def test_heads_are_normed_each_for_itself_in_place(pair: Team) -> None:
    buffer, weight = torch.randn(6, 100), torch.randn(20)
    expected = buffer.clone()
    heads = functional.rms_norm(expected[:, 10:70].view(6, 3, 20), [20], weight, eps=1e-6)
    expected[:, 10:70] = heads.flatten(1)
    run_job(pair, _head_norm_job, buffer[:, 10:].data_ptr(), 400, weight.data_ptr(), float_bits(1e-6))
    torch.testing.assert_close(buffer, expected, atol=1e-6, rtol=2e-6)


def test_what_does_not_fit_is_refused(team: Team) -> None:
    with pytest.raises(ValueError, match=r"weight: \[4\]"):
        Norm(4, torch.ones(5), None, 1e-6, team, is_centred=False)
    with pytest.raises(ValueError, match="no weight"):
        Norm(4, None, torch.ones(4), 1e-6, team, is_centred=True)
    norm = Norm(4, torch.ones(4), None, 1e-6, team, is_centred=False)
    with pytest.raises(ValueError, match="both or neither"):
        norm(torch.ones(2, 4), added=torch.ones(2, 4))
    with pytest.raises(TypeError, match="float32"):
        norm(torch.ones(2, 4).bfloat16())
