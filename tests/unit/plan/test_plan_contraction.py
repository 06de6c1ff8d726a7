"""What operations do with a weight, found by trying shapes and checked on numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from shoal.plan.contraction import Analyser, Contraction, Operation


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def roles(weight: torch.Tensor, func: Any, *args: Any, **kwargs: Any) -> Contraction | None:
    """The analysis of ``func(*args)``, of which ``weight`` is one argument."""
    return Analyser().analyse(Operation(func, args, kwargs, weight))


LINEAR = Contraction(((0, 2),), ((1, 2),), (), 0, ())


def test_a_linear_sums_over_the_last_dimension_of_both() -> None:
    weight = meta(12, 5)
    assert roles(weight, functional.linear, torch.randn(2, 3, 5), weight) == LINEAR


def test_equal_sizes_everywhere_are_told_apart() -> None:
    weight = meta(5, 5)
    found = roles(weight, functional.linear, torch.randn(5, 5), weight)
    assert found == Contraction(((0, 1),), ((1, 1),), (), 0, ())


def test_a_bias_is_a_term_that_runs_along_with_the_outputs() -> None:
    weight, bias = meta(12, 5), torch.arange(12.0)
    operation = Operation(functional.linear, (torch.randn(2, 3, 5), weight, bias), {}, weight)
    found = Analyser().analyse(operation)
    assert found == Contraction(((0, 2),), ((1, 2),), (), 0, (1,))
    added = operation.terms(found)
    assert added is not None
    assert torch.equal(added[0, 0], bias)


def test_a_scaled_product_and_a_term_that_comes_first() -> None:
    weight = meta(5, 6)
    found = roles(weight, torch.addmm, torch.randn(6), torch.randn(7, 5), weight, beta=3.0, alpha=2.0)
    assert found == Contraction(((1, 1),), ((0, 1),), (), 1, (0,))


def test_a_weight_that_stands_on_the_left_gives_an_inner_dimension() -> None:
    weight = meta(8, 5)
    found = roles(weight, torch.matmul, weight, torch.randn(2, 5, 7))
    assert found == Contraction(((0, 1),), ((1, 1),), (), 0, ())


def test_an_einsum_has_features_of_two_dimensions() -> None:
    weight = meta(10, 4, 3)
    made = roles(weight, torch.einsum, "ibh,hnd->ibnd", torch.randn(6, 2, 10), weight)
    taken = roles(weight, torch.einsum, "ibnd,hnd->ibh", torch.randn(6, 2, 4, 3), weight)
    assert made == Contraction(((1, 2), (2, 3)), ((0, 2),), (), 0, ())
    assert taken == Contraction(((0, 2),), ((1, 2), (2, 3)), (), 0, ())


def test_a_stack_of_experts_is_kept_as_a_batch() -> None:
    weight = meta(4, 5, 6)
    found = roles(weight, torch.bmm, torch.randn(4, 7, 5), weight)
    assert found == Contraction(((2, 2),), ((1, 2),), ((0, 0),), 0, ())


def test_a_convolution_over_all_channels_is_a_product_whatever_its_window() -> None:
    weight = meta(8, 5, 3)
    found = roles(weight, functional.conv1d, torch.randn(2, 5, 9), weight, torch.randn(8))
    assert found == Contraction(((0, 1),), ((1, 1),), (), 0, (1,))


def test_rows_of_a_table_are_looked_up() -> None:
    weight = meta(9, 5)
    found = roles(weight, functional.embedding, torch.tensor([[1, 2]]), weight)
    assert found == Contraction(((1, 2),), (), (), -1, ())


@pytest.mark.parametrize(
    "func", [torch.mul, torch.cdist, functional.cosine_similarity, torch.maximum, torch.add]
)
def test_what_only_looks_like_a_product_is_none(func: Any) -> None:
    """``cdist`` has the shapes of a product, and parts of its sum do not add up."""
    weight = meta(8, 5)
    assert roles(weight, func, torch.randn(8, 5), weight) is None


def test_a_convolution_per_channel_is_no_product() -> None:
    weight = meta(8, 1, 4)
    assert roles(weight, functional.conv1d, torch.randn(2, 8, 9), weight, groups=8, padding=3) is None


def test_an_operation_is_analysed_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    analyser, weight, runs = Analyser(), meta(12, 5), [0]

    def counted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        return functional.linear(x, weight)

    for _ in range(2):
        assert analyser.analyse(Operation(counted, (torch.randn(2, 3, 5), weight), {}, weight)) == LINEAR
        first = runs[0]
        weight = meta(12, 5)
        assert analyser.analyse(Operation(counted, (torch.randn(2, 3, 5), weight), {}, weight)) == LINEAR
        assert runs[0] == first
