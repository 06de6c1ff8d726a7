"""Plans for models in memory, on meta, in folders without weights, and for code of one's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import ModelNotFoundError, PlanError, UnsupportedError, UsageError
from shoal.model.plans import plan, prove
from shoal.plan.types import Plan
from support.planner import gpt2, llama


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))


def build(family: tuple[type[Any], Any]) -> Any:
    with torch.random.fork_rng():
        return family[0](family[1])


def test_a_model_in_memory_and_on_meta_and_its_config_alone_have_one_plan(tmp_path: Path) -> None:
    model = build(llama())
    model_class, config = llama()
    with torch.device("meta"):
        empty = model_class(config)
    config.architectures = [model_class.__name__]
    config.save_pretrained(tmp_path / "model")
    made = [
        plan(subject, tp=2)
        for subject in (model, empty, tmp_path / "model", tmp_path / "model" / "config.json")
    ]
    assert all(other.params == made[0].params for other in made)
    assert made[0].evidence["proved"] is True


def test_a_plan_proves_itself_again() -> None:
    made = plan(build(gpt2()), tp=2)
    assert made.prove()["proved"] is True
    assert prove(made) == made.prove()
    wrong = replace(made, patches=())
    with pytest.raises(PlanError):
        prove(wrong)
    with pytest.raises(PlanError):
        wrong.prove()


def test_a_plan_that_was_stored_is_proved_with_its_model() -> None:
    model = build(gpt2())
    stored = Plan.from_dict(plan(model, tp=2).to_dict())
    assert prove(stored, model)["proved"] is True
    with pytest.raises(UsageError, match="pass the model"):
        prove(stored)


def test_a_policy_is_taken() -> None:
    made = plan(build(llama()), tp=2, policy={"*.k_proj": "gather"})
    assert made.params["model.layers.*.self_attn.k_proj.weight"].op == "gather"


@pytest.mark.parametrize("tp", [0, -1, True, "2"])
def test_a_wrong_number_of_ranks_is_refused(tp: Any) -> None:
    with pytest.raises(UsageError, match="tp"):
        plan(build(llama()), tp=tp)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(UsageError, match="neither a transformers model"):
        plan(nn.Linear(2, 2), tp=2)
    with pytest.raises(ModelNotFoundError):
        plan("no/such/folder", tp=2)


def test_a_model_that_is_not_what_its_config_says_is_refused() -> None:
    model = build(llama())
    model.lm_head = nn.Linear(96, 50, bias=False)
    with pytest.raises(UnsupportedError, match="lm_head"):
        plan(model, tp=2)


def test_a_quantised_model_is_refused_by_its_config(tmp_path: Path) -> None:
    _, config = llama()
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="gptq"):
        plan(tmp_path, tp=2)
