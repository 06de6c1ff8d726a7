"""Proved plans: what fails is gathered, and what is proved is kept on disk."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.errors import PlanError
from shoal.plan.types import Plan
from shoal.prove import plan_and_prove
from shoal.prove.cache import load_plan, plan_key, store_plan
from support.planner import bloom, llama

# The package has a function of the module's name.
proving = importlib.import_module("shoal.prove.prove")


def test_a_proved_plan_carries_its_evidence(tmp_path: Path) -> None:
    plan = plan_and_prove(*llama(), 2, tmp_path)
    assert plan.evidence["proved"] is True
    assert len(plan.regions) == 2


def test_the_second_time_it_comes_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_and_prove(*llama(), 2, tmp_path)

    def never(*_: object) -> None:
        raise AssertionError("derived again")

    monkeypatch.setattr(proving, "derive", never)
    assert plan_and_prove(*llama(), 2, tmp_path) == plan


def test_no_folder_keeps_nothing(tmp_path: Path) -> None:
    plan_and_prove(*llama(), 2, None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "{", '{"version": 1}', "[]", "\x00\x01"])
def test_a_damaged_file_is_passed_over_and_said_so(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = plan_key(*llama(), 2)
    (tmp_path / f"{key}.json").write_text(content)
    with caplog.at_level(logging.WARNING, logger="shoal.prove"):
        plan = plan_and_prove(*llama(), 2, tmp_path)
    assert "damaged" in caplog.text
    assert load_plan(tmp_path, key) == plan


def test_a_stored_plan_without_a_proof_is_not_believed(tmp_path: Path) -> None:
    key = plan_key(*llama(), 2)
    store_plan(tmp_path, key, Plan(2, "LlamaForCausalLM"))
    assert plan_and_prove(*llama(), 2, tmp_path).evidence["proved"] is True


def test_the_key_depends_on_what_matters_and_on_nothing_else() -> None:
    model_class, config = llama()
    key = plan_key(model_class, config, 2)
    _, same = llama()
    same._name_or_path = "elsewhere"
    assert plan_key(model_class, same, 2) == key
    assert plan_key(model_class, config, 3) != key
    assert plan_key(*llama(hidden_size=192), 2) != key
    assert plan_key(*bloom(), 2) != key


def test_storing_leaves_one_whole_file(tmp_path: Path) -> None:
    store_plan(tmp_path / "new", "k", Plan(1, "X"))
    (path,) = (tmp_path / "new").iterdir()
    assert Plan.from_dict(json.loads(path.read_text())) == Plan(1, "X")


def test_a_folder_that_cannot_be_written_costs_only_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, logger="shoal.prove"):
        store_plan(tmp_path / "file", "k", Plan(1, "X"))
    assert "cannot be written" in caplog.text


def test_a_region_whose_numbers_fail_is_gathered_and_the_rest_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a proof that never accepts a split MLP, only the MLP is given up."""
    run = proving.run_plan

    def picky(plan: Plan, *rest: Any) -> float:
        split = [pattern for pattern, split in plan.params.items() if split.op == "row"]
        return 1.0 if any("down_proj" in pattern for pattern in split) else run(plan, *rest)

    monkeypatch.setattr(proving, "run_plan", picky)
    with caplog.at_level(logging.WARNING, logger="shoal.prove"):
        plan = plan_and_prove(*llama(), 2)
    assert [region.consumer for region in plan.regions] == ["model.layers.*.self_attn.o_proj.weight"]
    down = plan.params["model.layers.*.mlp.down_proj.weight"]
    assert (down.op, down.reason) == ("gather", "its proof failed")
    assert "down_proj" in caplog.text


def test_a_gathered_weight_whose_numbers_fail_is_replicated(monkeypatch: pytest.MonkeyPatch) -> None:
    run = proving.run_plan

    def picky(plan: Plan, *rest: Any) -> float:
        return 1.0 if plan.params["lm_head.weight"].op == "gather" else run(plan, *rest)

    monkeypatch.setattr(proving, "run_plan", picky)
    plan = plan_and_prove(*llama(), 2)
    assert plan.params["lm_head.weight"].op == "replicate"
    assert plan.params["lm_head.weight"].reason == "its proof failed"


def test_a_model_for_which_nothing_can_be_proved_gets_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "run_plan", lambda *_: float("nan"))
    with pytest.raises(PlanError, match="LlamaForCausalLM over 2 ranks"):
        plan_and_prove(*llama(), 2)


def test_a_model_that_detaches_is_never_split_wrongly() -> None:
    """Gradients that a model hides mean unknown: the plan must still be right."""
    model_class, config = llama()

    class Detached(model_class):  # type: ignore[misc,valid-type]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                layer.mlp.act_fn = Hidden()

    plan = plan_and_prove(Detached, config, 2)
    assert plan.evidence["proved"] is True


class Hidden(torch.nn.Module):
    """An activation that mixes all features, and lets no gradient through."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x / (1 + x.abs().mean(-1, keepdim=True))).detach()
