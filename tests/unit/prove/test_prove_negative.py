"""Plans and layers that are wrong on purpose: the proof refuses each, whole and by the part it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import PlanError
from shoal.plan.derive import derive
from shoal.plan.types import Plan, even_ranges
from shoal.prove import plan_and_prove, prove
from shoal.shard.layers import GatheredLinear, RowLinear, VocabEmbedding
from support.planner import Family, bloom, gpt2, gpt_neox, llama, opt


def change(plan: Plan, name: str, **changes: Any) -> Plan:
    pattern = next(pattern for pattern in plan.params if name in pattern)
    return replace(plan, params={**plan.params, pattern: replace(plan.params[pattern], **changes)})


def contiguous(plan: Plan) -> Plan:
    return change(plan, "c_attn", ranges=even_ranges(288, 2))


def stacked(plan: Plan) -> Plan:
    """Head by head as if it were all queries, all keys, all values."""
    size = next(split.size for name, split in plan.params.items() if "query_key_value" in name)
    third, half = size // 3, size // 6
    ranges = tuple(
        tuple((part * third + rank * half, part * third + (rank + 1) * half) for part in range(3))
        for rank in range(2)
    )
    return change(plan, "query_key_value", ranges=ranges)


def swapped_alibi(plan: Plan) -> Plan:
    return replace(plan, args=tuple(replace(entry, ranges=entry.ranges[::-1]) for entry in plan.args))


def untied(plan: Plan) -> Plan:
    """The head cut otherwise than the embedding that it is."""
    return change(plan, "lm_head", ranges=(((0, 40),), ((40, 101),)))


def tied_llama() -> tuple[type[Any], Any]:
    return llama(tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("family", "broken"),
    [
        (gpt2, contiguous),
        (gpt_neox, stacked),
        (bloom, stacked),
        (bloom, swapped_alibi),
        (bloom, lambda plan: replace(plan, args=())),
        (opt, lambda plan: replace(plan, patches=())),
        (tied_llama, untied),
        (llama, lambda plan: change(plan, "o_proj", op="column", dim=0, ranges=even_ranges(96, 2), size=96)),
    ],
)
def test_a_plan_that_is_wrong_does_not_prove(family: Family, broken: Callable[[Plan], Plan]) -> None:
    model_class, config = family()
    plan = derive(model_class, config, 2)
    assert prove(plan, model_class, config)["proved"] is True
    with pytest.raises(PlanError):
        prove(broken(plan), model_class, config)


def test_a_plan_for_other_widths_does_not_prove() -> None:
    model_class, config = llama()
    _, wider = llama(intermediate_size=320)
    with pytest.raises(PlanError, match="the plan was made for 160"):
        prove(derive(model_class, config, 2), model_class, wider)


def forgets_its_sum(self: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, self.weight, self.bias)


def adds_its_bias_n_times(self: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = self.comm.all_reduce(nn.functional.linear(x, self.weight, self.bias))
    return result


def forgets_the_others(self: Any, x: torch.Tensor) -> torch.Tensor:
    own = nn.functional.linear(x, self.weight, self.bias)
    return torch.cat([own, own.new_zeros(*own.shape[:-1], sum(self.sizes) - own.shape[-1])], -1)


def looks_up_foreign_rows(self: Any, ids: torch.Tensor) -> torch.Tensor:
    rows: torch.Tensor = self.comm.all_reduce(
        nn.functional.embedding(ids % self.weight.shape[0], self.weight)
    )
    return rows


LAYERS = [
    (RowLinear, forgets_its_sum, "fc2"),
    (RowLinear, adds_its_bias_n_times, "out_proj"),
    (GatheredLinear, forgets_the_others, "lm_head"),
    (VocabEmbedding, looks_up_foreign_rows, "embed_tokens"),
]


@pytest.mark.parametrize(("layer", "forward", "named"), LAYERS)
def test_a_broken_layer_fails_the_proof_which_names_where(
    monkeypatch: pytest.MonkeyPatch, layer: type[nn.Module], forward: Any, named: str
) -> None:
    model_class, config = opt()
    plan = derive(model_class, config, 2)
    monkeypatch.setattr(layer, "forward", forward)
    with pytest.raises(PlanError, match=named):
        prove(plan, model_class, config)
    with pytest.raises(PlanError, match=rf"{named}.*measured to be right, but its proof fails"):
        plan_and_prove(model_class, config, 2, anew=True)


def test_where_nobody_asks_for_a_proof_anew_the_safe_way_is_taken_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RowLinear, "forward", forgets_its_sum)
    plan = plan_and_prove(*opt(), 2)
    assert not plan.regions
    assert "fc2.weight is not split as measured, its proof failed" in caplog.text
