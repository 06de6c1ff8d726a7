"""``shoal plan``: bytes, heads and collectives, counted on a small model with a plan made by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest
from torch import nn

from shoal.cli.plan_report import ModelFacts, plan_report
from shoal.plan.types import KeyValueHeads, Plan, Region, Split

FACTS = ModelFacts(name="tiny", architecture="Tiny", bytes_per_number=4)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(6, 9)
        self.o = nn.Linear(9, 6)
        self.norm = nn.LayerNorm(6)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight


QUERIES = (((0, 6),), ((6, 9),))
VOCABULARY = (((0, 5),), ((5, 10),))
PLAN = Plan(
    tp=2,
    model_class="Tiny",
    params={
        "layers.*.q.weight": Split("column", 0, 9, QUERIES, "split"),
        "layers.*.o.weight": Split("row", 1, 9, QUERIES, "once"),
        "embed.weight": Split("vocab", 0, 10, VOCABULARY),
        "head.weight": Split("gather", 0, 10, VOCABULARY, reason="the logits are needed whole"),
        "layers.*.norm.weight": Split("replicate", reason="a norm"),
    },
    kv=(KeyValueHeads(((0, 2),), (2, 1), 1, 1, True),),
    regions=(Region("layers.*.o.weight", ("layers.*.q.weight",), 3, (2, 1), 9, (3,)),),
)


def test_the_report_counts_on_the_models_own_tensors():
    report = plan_report(PLAN, Tiny(), FACTS)
    assert list(report) == [
        "model", "architecture", "tp", "proved", "coverage", "collectives_per_forward", "ranks", "blocks",
    ]  # fmt: skip
    norms, whole_bias = 2 * 12, 2 * 6
    split_0, split_1 = 2 * (6 * 6 + 6 + 6 * 6), 2 * (3 * 6 + 3 + 6 * 3)
    assert report["ranks"] == [
        {
            "rank": 0,
            "weight_bytes": 4 * (30 + split_0 + whole_bias + norms),
            "kv_bytes_per_token": 2 * 2 * 2 * 4,
            "heads": 2,
            "kv_heads": 2,
        },
        {
            "rank": 1,
            "weight_bytes": 4 * (30 + split_1 + whole_bias + norms),
            "kv_bytes_per_token": 2 * 1 * 2 * 4,
            "heads": 1,
            "kv_heads": 1,
        },
    ]
    assert report["collectives_per_forward"] == 1 + 2 + 1
    total = 60 + split_0 + split_1 + whole_bias + norms
    assert report["coverage"] == {
        "column_row": pytest.approx((split_0 + split_1) / total, abs=1e-4),
        "gathered": pytest.approx(60 / total, abs=1e-4),
        "replicated": pytest.approx((whole_bias + norms) / total, abs=1e-4),
    }


def test_kv_that_was_not_measured_is_unknown_not_zero():
    unmeasured = dataclasses.replace(PLAN, kv=())
    report = plan_report(unmeasured, Tiny(), FACTS)
    assert report["ranks"][0]["kv_bytes_per_token"] is None


def test_the_text_has_a_row_per_block_and_rank(run, monkeypatch):
    monkeypatch.setattr("shoal.cli.plan._make_report", lambda config: plan_report(PLAN, Tiny(), FACTS))
    ended = run("plan", "tiny", "-tp", "2")
    assert ended.status == 0
    lines = ended.out.splitlines()
    assert "proved: yes" in lines
    assert any(line.split() == ["layers.*.q.weight", "column", "6", "/", "3", "3"] for line in lines)
    assert any("the logits are needed whole" in line for line in lines)
    assert lines[-2].split()[0] == "0" and lines[-1].split()[0] == "1"


def test_json_is_one_document(run, monkeypatch):
    configs = []

    def make(config):
        configs.append(config)
        return plan_report(PLAN, Tiny(), FACTS)

    monkeypatch.setattr("shoal.cli.plan._make_report", make)
    report = json.loads(run("plan", "tiny", "-tp", "2", "--json").out)
    assert report["blocks"][0] == {
        "pattern": "layers.*.q.weight",
        "split": "column",
        "components": 3,
        "sizes": [6, 3],
        "reason": "",
    }
    assert configs[0].tensor_parallel_size == 2
