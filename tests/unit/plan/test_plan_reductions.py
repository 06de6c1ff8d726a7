"""Where sums over ranks can wait, found on small models whose blocks add several results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as T
from torch import nn

from shoal.plan.derive import derive
from shoal.plan.drive import batch_of
from shoal.plan.footprint import count_collectives
from shoal.plan.glue import Glue
from shoal.plan.probe import record
from shoal.plan.reductions import LateSums, consistent, find_reductions, reducing_modules
from shoal.plan.skeleton import build_probe
from shoal.plan.types import Plan, Reduction, Split, even_ranges
from support.mixtures import NEURONS, WIDTH, Expert, Model, config_of
from support.planner import llama

BLOCK = "layers.*.mixture"
FIRST, EXPERTS, SHARED = (
    "layers.*.first.w2.weight",
    f"{BLOCK}.experts.*.w2.weight",
    f"{BLOCK}.shared.w2.weight",
)


def find(
    model_class: type[nn.Module], config: Any, *weights: str, given: tuple[Reduction, ...] = ()
) -> LateSums:
    model = build_probe(model_class, config)
    recordings = [record(model, batch_of(config.vocab_size, rows, 8)) for rows in (1, 2)]
    return find_reductions(Glue(model, recordings), weights, given=given)


@pytest.mark.parametrize("bias", [False, True])
def test_experts_of_a_list_are_summed_once_in_the_module_that_adds_them(bias: bool) -> None:
    found = find(Model, config_of(bias=bias), FIRST, EXPERTS)
    assert found == LateSums((Reduction(BLOCK, 0, (EXPERTS,)),))


def test_a_shared_expert_is_summed_with_the_others_and_the_rest_where_it_is_used() -> None:
    found = find(Model, config_of(shared=True), FIRST, EXPERTS, SHARED)
    assert found == LateSums((Reduction(BLOCK, 0, (EXPERTS, SHARED)),))


def test_what_the_block_adds_itself_is_added_by_one_rank() -> None:
    found = find(Model, config_of(shared=True, term=True, bias=True), FIRST, EXPERTS, SHARED)
    assert found == LateSums((Reduction(BLOCK, 0, (EXPERTS, SHARED)),), frozenset({f"{BLOCK}.term"}))
    assert found.splits()[f"{BLOCK}.term"].op == "once"


def test_a_norm_over_the_sum_forbids_to_wait() -> None:
    assert find(Model, config_of(shared=True, norm=True, term=True), FIRST, EXPERTS, SHARED) == LateSums()


def test_one_weight_a_block_needs_no_late_sum() -> None:
    assert find(Model, config_of(), FIRST) == LateSums()
    assert find(Model, config_of(shared=True), FIRST, SHARED) == LateSums()


def test_a_sum_that_is_settled_is_merged_with_what_is_beside_it() -> None:
    settled = Reduction(f"{BLOCK}.shared", 0, (SHARED,))
    found = find(Model, config_of(shared=True), EXPERTS, given=(settled,))
    assert found == LateSums((Reduction(BLOCK, 0, (EXPERTS, SHARED)),))
    assert find(Model, config_of(shared=True), given=(settled,)) == LateSums((settled,))


class Beside(nn.Module):
    """Two branches of which the results meet in one module; how, the subclasses say."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.left, self.right = Expert(False), Expert(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        raise NotImplementedError


class Residual(Beside):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.left(x) + self.right(x)


class Clipped(Beside):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.left(x) + self.right(x)).relu()


class Multiplied(Beside):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) * self.right(x)


class Feeding(Beside):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(self.left(x))


class Telling(Beside):
    """A second output depends on the results, too."""

    def forward(self, x: torch.Tensor) -> Any:
        out = self.left(x) + self.right(x)
        return out, out.square()


class Leaking(Beside):
    """Keeps a result where code outside reads it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.left(x)
        return self.kept + self.right(x)


class Sometimes(Beside):
    """Takes another way for one token, which no recorded result is part of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x) if x.shape[0] == 1 else self.left(x) + self.right(x)


class Gated(Beside):
    """The second of three outputs is the sum; a gate that the results do not reach."""

    def forward(self, x: torch.Tensor) -> Any:
        gate = torch.sigmoid(self.gate(x))
        return None, gate * (self.left(x) + 2 * self.right(x)), gate


class Branches(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, WIDTH)
        self.layers = nn.ModuleList(config.kind(config) for _ in range(2))
        self.head = nn.Linear(WIDTH, config.vocab_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            out = layer(x)
            is_third = isinstance(out, tuple) and out[0] is None
            x = x + (out[1] if is_third else out[0] if isinstance(out, tuple) else out)
            x = x + getattr(layer, "kept", 0)
        logits: torch.Tensor = self.head(x)
        return logits


BRANCHES = ("layers.*.left.w2.weight", "layers.*.right.w2.weight")


@pytest.mark.parametrize("kind", [Residual, Clipped, Multiplied, Feeding, Telling, Leaking, Sometimes])
def test_branches_that_do_not_just_add_up_are_summed_where_they_are_used(kind: type[Beside]) -> None:
    assert find(Branches, config_of(kind=kind), *BRANCHES) == LateSums()


def test_the_output_that_adds_up_is_named() -> None:
    assert find(Branches, config_of(kind=Gated), *BRANCHES) == LateSums((Reduction("layers.*", 1, BRANCHES),))


class Writing(Beside):
    """Writes into what it is given, so that a recording cannot be repeated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(self.left(x)) + self.right(x)


def test_a_model_that_cannot_be_repeated_is_left_alone() -> None:
    assert find(Branches, config_of(kind=Writing), *BRANCHES) == LateSums()


def plan_of(*reductions: Reduction) -> Plan:
    row = Split("row", 1, NEURONS, even_ranges(NEURONS, 2))
    params = {**dict.fromkeys((FIRST, EXPERTS, SHARED), row), f"{BLOCK}.term": Split("once")}
    return Plan(2, "Model", params, reductions=reductions)


def test_collectives_are_counted_per_module_that_sums() -> None:
    model = Model(config_of(shared=True, term=True))
    assert count_collectives(plan_of(), model, {}).all_reduces == 2 * (1 + 4 + 1)
    assert count_collectives(plan_of(), model, {EXPERTS: 2}).all_reduces == 2 * (1 + 8 + 1)
    late = plan_of(Reduction(BLOCK, 0, (EXPERTS, SHARED)))
    assert count_collectives(late, model, {EXPERTS: 2}).all_reduces == 2 * (1 + 1)


def test_only_modules_that_hold_a_weight_sum() -> None:
    model: Any = Model(config_of(shared=True))
    model.layers[0].mixture = Expert(False)
    found = list(reducing_modules(model, [Reduction(BLOCK, 0, (SHARED,))]))
    assert [(module, weights) for module, _, weights in found] == [
        (model.layers[1].mixture, {"layers.1.mixture.shared.w2.weight"})
    ]


def test_a_late_sum_goes_with_the_weights_that_it_was_made_for() -> None:
    plan = plan_of(Reduction(BLOCK, 0, (EXPERTS, SHARED)))
    assert consistent(plan) is plan
    changed = Plan(2, "Model", {**plan.params, SHARED: Split("replicate")}, reductions=plan.reductions)
    assert consistent(changed).reductions == ()
    assert consistent(changed).params[f"{BLOCK}.term"].op == "replicate"


MOE: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2,
}  # fmt: skip


def test_stacked_experts_and_a_gated_shared_expert_are_summed_once_a_layer() -> None:
    config = T.Qwen2MoeConfig(
        **MOE, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=48
    )
    plan = derive(T.Qwen2MoeForCausalLM, config, 2)
    block = "model.layers.*.mlp"
    weights = (f"{block}.experts.down_proj", f"{block}.shared_expert.down_proj.weight")
    assert plan.reductions == (Reduction(block, 0, weights),)
    assert plan.evidence["all_reduces"] == 2 * 2 + 1  # attention and experts of each layer, the vocabulary


def test_the_biases_of_stacked_experts_are_added_by_one_rank() -> None:
    config = T.GptOssConfig(
        **MOE, intermediate_size=48, head_dim=16, num_local_experts=4, sliding_window=16, pad_token_id=0
    )
    plan = derive(T.GptOssForCausalLM, config, 3)
    experts = "model.layers.*.mlp.experts"
    assert plan.reductions == (Reduction(experts, 0, (f"{experts}.down_proj",)),)
    assert [name for name, split in plan.params.items() if split.op == "once"] == [
        f"{experts}.down_proj_bias"
    ]
    assert plan.params[f"{experts}.gate_up_proj_bias"].op == "column"


def test_blocks_of_one_sum_are_left_as_they_are() -> None:
    model_class, config = llama()
    assert derive(model_class, config, 2).reductions == ()
