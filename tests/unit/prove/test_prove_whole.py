"""Proved plans on the real, full-depth models they were made for."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

from shoal.comm.simulated import SimulatedComm, run_ranks
from shoal.prove import plan_and_prove
from shoal.shard import shard
from support.planner import FAMILIES, llama


def real_model(model_class: type[Any], config: Any, attention: str) -> Any:
    """Random float64 weights, wide enough that every one of them matters."""
    config._attn_implementation = attention
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).double().eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


CASES = {name: family() for name, family in FAMILIES.items()} | {
    "9 heads, 3 KV heads": llama(hidden_size=144, num_attention_heads=9, num_key_value_heads=3),
    "one KV head": llama(num_key_value_heads=1),
}


def grid() -> list[Any]:
    """Every case once in the fast suite, and the whole grid in the full one."""
    cells = []
    for name in sorted(CASES):
        kinds = ["eager"] if name == "bloom" else ["sdpa", "eager"]
        for tp, attention in itertools.product((2, 4), kinds):
            marks = [] if (tp, attention) == (2, kinds[0]) else [pytest.mark.full]
            cells.append(pytest.param(name, tp, attention, marks=marks, id=f"{name}-{tp}-{attention}"))
    return cells


@pytest.mark.parametrize(("name", "tp", "attention"), grid())
def test_logits_and_greedy_tokens_equal_the_unsharded_models(name: str, tp: int, attention: str) -> None:
    model_class, config = copy.deepcopy(CASES[name])
    plan = plan_and_prove(model_class, config, tp)
    whole = real_model(model_class, config, attention)
    ids = torch.randint(5, 101, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0

    @torch.no_grad()
    def outputs(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(input_ids=ids, attention_mask=mask).logits
        tokens = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, min_new_tokens=6,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        return logits, tokens

    def body(comm: SimulatedComm) -> tuple[torch.Tensor, torch.Tensor]:
        model = copy.deepcopy(whole)
        shard(model, plan, comm.rank, comm)
        return outputs(model)

    expected_logits, expected_tokens = outputs(whole)
    for logits, tokens in run_ranks(tp, body):
        difference = (logits - expected_logits).abs().max() / expected_logits.abs().max()
        assert float(difference) < 1e-9
        assert torch.equal(tokens, expected_tokens)
