"""Plans that are derived: what is split, how, and that nothing else is touched."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.errors import PlanError
from shoal.plan.derive import derive
from shoal.plan.types import Plan, total
from support.planner import FAMILIES, bloom, demo, gpt2, gpt_neox, llama


def operations(plan: Plan) -> dict[str, str]:
    return {name.removesuffix(".weight").rpartition(".")[2]: split.op for name, split in plan.params.items()}


def sizes(plan: Plan, name: str) -> tuple[int, ...]:
    return next(split.sizes for key, split in plan.params.items() if key.endswith(f".{name}.weight"))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_attention_and_mlp_of_every_family_are_split_column_row(family: str) -> None:
    plan = derive(*FAMILIES[family](), 2)
    assert len(plan.regions) == 2, {name: split.reason for name, split in plan.params.items()}
    inner = {name: split.op for name, split in plan.params.items() if ".*." in name}
    assert set(inner.values()) == {"column", "row"}
    assert all(entry.is_split for entry in plan.kv)
    for split in plan.params.values():
        if split.op in ("row", "gather", "vocab"):
            assert sum(split.sizes) == split.size


def test_the_demo_model_at_two_ranks_is_split_by_kv_group_and_balanced_by_neurons() -> None:
    plan = derive(*demo(), 2)
    assert sizes(plan, "q_proj") == (384, 192)
    assert sizes(plan, "k_proj") == (128, 64)
    assert sizes(plan, "v_proj") == (128, 64)
    assert sizes(plan, "o_proj") == (384, 192)
    down = sizes(plan, "down_proj")
    assert down[0] < down[1]
    assert [(entry.layers, entry.heads) for entry in plan.kv] == [(((0, 30),), (2, 1))]
    assert operations(plan)["embed_tokens"] == "vocab"
    assert operations(plan)["lm_head"] == "gather"


def test_kv_heads_fewer_than_ranks_are_duplicated_and_each_rank_has_one() -> None:
    plan = derive(*llama(num_attention_heads=9, num_key_value_heads=3, hidden_size=144), 4)
    assert sum(sizes(plan, "q_proj")) == 144
    assert sizes(plan, "k_proj") == (16, 16, 16, 16)
    assert plan.kv[0].heads == (1, 1, 1, 1)
    (patch,) = plan.patches
    assert patch.attribute == "num_key_value_groups"
    groups = [size // 16 for size in sizes(plan, "q_proj")]
    assert list(patch.values) == groups  # not 1 everywhere, which eager attention's broadcasting would allow
    assert any("k_proj" in name for region in plan.regions for name in region.duplicated)


def test_one_kv_head_is_kept_whole_by_every_rank_without_a_collective() -> None:
    plan = derive(*llama(num_attention_heads=6, num_key_value_heads=1), 3)
    assert operations(plan)["k_proj"] == "replicate"
    assert operations(plan)["v_proj"] == "replicate"
    assert sizes(plan, "q_proj") == (32, 32, 32)
    assert plan.kv[0].heads == (1, 1, 1)
    assert not plan.kv[0].is_split


def test_more_ranks_than_heads_gathers_attention_and_says_why() -> None:
    plan = derive(*llama(num_attention_heads=3, num_key_value_heads=3), 5)
    attention = {name: split for name, split in plan.params.items() if "self_attn" in name}
    assert {split.op for split in attention.values()} <= {"gather", "replicate"}
    assert any("3 components are fewer than 5 ranks" in split.reason for split in attention.values())
    assert plan.kv[0].heads == (3,) * 5
    assert operations(plan)["down_proj"] == "row"


def test_an_interleaved_fused_projection_is_cut_head_by_head() -> None:
    """GPT-NeoX stores (head, q k v, feature): a rank's rows are whole heads, in one range."""
    plan = derive(*gpt_neox(), 3)
    split = next(split for name, split in plan.params.items() if "query_key_value" in name)
    assert split.ranges == (((0, 96),), ((96, 192),), ((192, 288),))


def test_a_stacked_fused_projection_is_cut_in_three_ranges() -> None:
    """GPT-2 stores (q k v, head, feature), [in, out]."""
    plan = derive(*gpt2(), 2)
    split = next(split for name, split in plan.params.items() if "c_attn" in name)
    assert split.dim == 1
    assert split.ranges == (((0, 48), (96, 144), (192, 240)), ((48, 96), (144, 192), (240, 288)))
    assert split.bias == "split"


def test_alibi_is_sliced_by_head_along_its_fused_dimension() -> None:
    plan = derive(*bloom(), 3)
    (argument,) = plan.args
    assert (argument.argument, argument.dim, argument.period) == ("alibi", -3, 4)
    assert [total(part) for part in argument.ranges] == list(plan.regions[0].shares)


def test_one_rank_needs_no_plan_but_knows_its_kv_heads() -> None:
    plan = derive(*llama(), 1)
    assert (plan.params, plan.patches, plan.args) == ({}, (), ())
    assert plan.kv[0].heads == (3,)


def test_a_rank_count_below_one_is_refused() -> None:
    with pytest.raises(PlanError, match="tensor_parallel_size"):
        derive(*llama(), 0)


def test_deriving_is_repeatable_and_plans_are_small() -> None:
    first, second = derive(*llama(), 2), derive(*llama(), 2)
    assert first == second
    assert len(json.dumps(first.to_dict())) < 5000


def test_neither_the_config_nor_global_torch_state_is_touched() -> None:
    model_class, config = bloom()
    before, state, dtype = copy.deepcopy(config), torch.get_rng_state(), torch.get_default_dtype()
    attributes = dict(vars(config))
    derive(model_class, config, 2)
    assert vars(config) == attributes
    assert config.to_dict() == before.to_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == dtype
    assert torch.is_grad_enabled()


def test_plans_are_derived_in_any_thread_and_side_by_side() -> None:
    expected = {name: derive(*FAMILIES[name](), 2) for name in ("llama", "gpt2")}
    got: dict[str, Plan] = {}

    def work(name: str) -> None:
        got[name] = derive(*FAMILIES[name](), 2)

    threads = [threading.Thread(target=work, args=(name,)) for name in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == expected


def test_nothing_of_the_models_size_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest real tensor made for a model of 256 thousand token ids stays small."""
    import shoal.plan.probe as probe

    largest = 0
    plain: Callable[..., Any] = probe._Recorder.use

    def watch(self: Any, use: Any) -> torch.Tensor:
        nonlocal largest
        result: torch.Tensor = plain(self, use)
        largest = max(largest, result.numel())
        assert use.tensor.is_meta
        return result

    monkeypatch.setattr(probe._Recorder, "use", watch)
    derive(*llama(vocab_size=256_000, hidden_size=768, num_attention_heads=12), 2)
    assert 0 < largest < 256_000 * 20


def test_layers_that_differ_in_shape_are_split_each_by_its_own_name() -> None:
    """A model whose layers have different widths gets a split per layer, not a wrong pattern."""
    model_class, config = llama()

    class Uneven(model_class):  # type: ignore[misc,valid-type]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            mlp = self.model.layers[1].mlp
            for name, shape in {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}.items():
                setattr(mlp, name, torch.nn.Linear(*shape, bias=False))

    plan = derive(Uneven, config, 2)
    for layer, width in ((0, 160), (1, 64)):
        split = plan.params[f"model.layers.{layer}.mlp.down_proj.weight"]
        assert (split.op, split.size) == ("row", width)
    assert plan.params["model.layers.1.mlp.up_proj.weight"].op == "column"


@pytest.mark.full
@pytest.mark.parametrize("tp", [3, 4, 5])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_at_more_ranks_keeps_its_mlp_split(family: str, tp: int) -> None:
    plan = derive(*FAMILIES[family](), tp)
    assert plan.regions
    assert all(sum(split.sizes) == split.size for split in plan.params.values() if split.op == "row")
