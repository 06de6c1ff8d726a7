"""Results that have no gradient lead to what they were made of all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.plan.decisions import Decisions
from shoal.prove import plan_and_prove
from support.zoo.catalogue import LISTED


def followed(code: Callable[[torch.Tensor], Any]) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Input [2, 6], the result, and the operations that decided by something."""
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    decisions = Decisions()
    with decisions:
        y = code(x * 1.0)
    return x, y, [name for name, _ in decisions.taken]


def reached(x: torch.Tensor, y: torch.Tensor, column: int) -> list[int]:
    """Columns of x that the gradient of a column of y leads to."""
    cotangent = torch.zeros_like(y)
    cotangent[:, column] = 1.5
    gradient = torch.autograd.grad(y, x, cotangent)[0]
    return [int(i) for i in (gradient != 0).any(0).nonzero().flatten()]


@pytest.mark.parametrize(
    "code",
    [
        lambda x: (x > 0).to(x.dtype),
        lambda x: x.detach() * 2,
        lambda x: x.sign(),
        lambda x: torch.floor(x),
        lambda x: torch.where(x > 5, x.new_ones(()), x.new_zeros(())).expand_as(x),
        lambda x: (~((x > 5) | (x < -5))).float(),
    ],
)
def test_what_jumps_element_by_element_leads_to_its_own_element(
    code: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x, y, taken = followed(code)
    assert reached(x, y, 2) == [2]
    assert not taken


def test_a_comparison_of_a_sum_leads_to_all_that_was_summed() -> None:
    x, y, _ = followed(lambda x: x + (x.sum(-1, keepdim=True) > 30).to(x.dtype))
    assert reached(x, y, 2) == list(range(6))


def test_values_are_what_they_were() -> None:
    x, y, _ = followed(lambda x: torch.where(x > 0, x, x.round()))
    assert torch.equal(y, torch.where(x > 0, x, x.round()))


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (lambda x: x * 2 if bool(x.sum() > 30) else x, "gt"),
        (lambda x: x * x.sum().item(), "item"),
        (lambda x: x[:, x[0].argsort()], "argsort"),
        (lambda x: x.clone().masked_fill_(x.sum() > 3, 0.0), "gt"),
        (lambda x: x + x.detach().sort(-1).values, "detach"),
        (lambda x: x.gather(1, x.argmax(-1, keepdim=True)).expand(2, 6), "argmax"),
    ],
)
def test_a_decision_that_does_not_lie_on_its_result_needs_all_of_its_source(
    code: Callable[[torch.Tensor], torch.Tensor], name: str
) -> None:
    _, _, taken = followed(code)
    assert name in taken


def test_shapes_and_masks_of_the_input_alone_decide_nothing() -> None:
    mask = torch.tensor([[True] * 5 + [False]] * 2)
    _, _, taken = followed(lambda x: x.masked_fill((~mask).expand_as(x), -1e9) + torch.zeros_like(x))
    assert not taken


def test_a_feed_forward_that_compares_all_its_features_is_not_split() -> None:
    """The comparison is false on whatever it is probed and proved with, and true for other weights."""
    model_class, config = LISTED["llama"].load()

    class Jumps(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = nn.functional.silu(x)
            return h + (h.sum(-1, keepdim=True) > 1e4).to(h.dtype)

    class Jumping(model_class):  # type: ignore[misc,valid-type]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                layer.mlp.act_fn = Jumps()

    plan = plan_and_prove(Jumping, config, 2)
    assert plan.params["model.layers.*.mlp.down_proj.weight"].op == "gather"
    assert plan.params["model.layers.*.self_attn.o_proj.weight"].op == "row"
