"""``shoal plan``: bytes, heads and collectives, counted on a small model with a plan made by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest
import transformers as T
from torch import nn

from shoal.cli.plan import as_text
from shoal.cli.plan_report import ModelFacts, plan_report
from shoal.model.foresee import Foreseen
from shoal.plan.types import KeyValueHeads, Plan, Region, Split
from shoal.shard.layers import RowLinear
from support.planner import opt

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
    evidence={"proved": True},
)


def test_the_report_counts_on_the_models_own_tensors():
    report = plan_report(PLAN, Tiny(), FACTS)
    assert report.keys() >= {
        "model", "architecture", "tp", "proved", "coverage", "collectives_per_forward", "ranks", "blocks",
    }  # fmt: skip
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
    assert (report["all_reduces"], report["all_gathers"]) == (3, 1)
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
    assert any("KV cache: unknown" in line for line in as_text(report))


def test_a_model_without_a_cache_takes_no_bytes_for_a_token():
    without = dataclasses.replace(PLAN, kv=(), evidence={"kv_cache": "none: the model keeps no cache"})
    report = plan_report(without, Tiny(), FACTS)
    assert (report["ranks"][0]["kv_bytes_per_token"], report["ranks"][0]["kv_heads"]) == (0, 0)
    assert as_text(report)[-1] == "KV cache: none: the model keeps no cache"


def test_a_plan_without_a_proof_is_not_called_proved():
    unproved = dataclasses.replace(PLAN, evidence={})
    assert plan_report(unproved, Tiny(), FACTS)["proved"] is False


def test_the_text_has_a_row_per_block_and_rank(run, monkeypatch):
    monkeypatch.setattr("shoal.cli.plan._make_report", lambda *_: plan_report(PLAN, Tiny(), FACTS))
    ended = run("plan", "tiny", "-tp", "2")
    assert ended.status == 0
    lines = ended.out.splitlines()
    assert "proved: yes" in lines
    assert any(
        line.split() == ["layers.*.q.weight", "column", "2", "/", "1", "6", "/", "3"] for line in lines
    )
    assert any("the logits are needed whole" in line for line in lines)
    assert lines[-2].split()[0] == "0" and lines[-1].split()[0] == "1"


def test_json_is_one_document(run, monkeypatch):
    configs = []

    def make(config, anew):
        configs.append((config, anew))
        return plan_report(PLAN, Tiny(), FACTS)

    monkeypatch.setattr("shoal.cli.plan._make_report", make)
    report = json.loads(run("plan", "tiny", "-tp", "2", "--json").out)
    assert report["blocks"][0] == {
        "pattern": "layers.*.q.weight",
        "split": "column",
        "components": {"total": 3, "per_rank": [2, 1]},
        "sizes": [6, 3],
        "reason": "",
    }
    assert (configs[0][0].tensor_parallel_size, configs[0][1]) == (2, False)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """``folder(config)``: a folder with nothing but the config in it."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))

    def save(model_class, config):
        config.architectures = [model_class.__name__]
        config.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


def test_a_config_is_enough(run, folder):
    ended = run("plan", folder(*opt()), "-tp", "2", "--json")
    report = json.loads(ended.out)
    assert (ended.status, report["proved"], report["architecture"]) == (0, True, "OPTForCausalLM")
    assert report["coverage"]["column_row"] > 0.5


def test_encoders_and_encoder_decoders_are_planned_too(run, folder):
    bert = (
        T.BertForSequenceClassification,
        T.BertConfig(
            vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
        ),
    )
    report = json.loads(run("plan", folder(*bert), "-tp", "2", "--json").out)
    assert report["architecture"] == "BertForSequenceClassification"
    assert [(rank["heads"], rank["kv_bytes_per_token"]) for rank in report["ranks"]] == [(2, 0), (2, 0)]
    t5 = (
        T.T5ForConditionalGeneration,
        T.T5Config(vocab_size=101, d_model=64, d_ff=96, num_layers=2, num_heads=4, d_kv=16),
    )
    report = json.loads(run("plan", folder(*t5), "-tp", "2", "--json").out)
    assert [(rank["heads"], rank["kv_heads"]) for rank in report["ranks"]] == [(2, 2), (2, 2)]


def test_a_proof_asked_for_is_run_though_the_plan_is_cached_and_fails_with_broken_layers(
    run, folder, monkeypatch
):
    name = folder(*opt())
    assert run("plan", name, "-tp", "2").status == 0
    assert run("plan", name, "-tp", "2", "--prove").status == 0
    monkeypatch.setattr(RowLinear, "forward", lambda self, x: nn.functional.linear(x, self.weight, self.bias))
    assert run("plan", name, "-tp", "2").status == 0
    ended = run("plan", name, "-tp", "2", "--prove")
    assert (ended.status, ended.out) == (1, "")
    assert "model.decoder.layers.*.fc2.weight" in ended.err and "proof fails" in ended.err


def test_a_policy_file_is_followed_or_refused(run, folder, tmp_path):
    name, policy = folder(*opt()), tmp_path / "policy.yaml"
    policy.write_text("OPTDecoderLayer: [self_attn.out_proj, fc2]\nlm_head: replicate\n")
    report = json.loads(run("plan", name, "-tp", "2", "--policy", str(policy), "--json").out)
    assert {block["pattern"]: block["split"] for block in report["blocks"]}["lm_head.weight"] == "replicate"
    policy.write_text("OPTDecoderLayer: [fc1]\n")
    ended = run("plan", name, "-tp", "2", "--policy", str(policy))
    assert ended.status == 1 and "fc1 as row: relative error" in ended.err
    policy.write_text("OPTDecoderLayer: [fc3]\n")
    ended = run("plan", name, "-tp", "2", "--policy", str(policy))
    assert ended.status == 2 and "'fc3' names no linear" in ended.err


def test_the_way_a_model_will_be_served_is_said_with_its_cost():
    foreseen = Foreseen("recompute", "every token costs a pass", ("not paged: so",))
    report = plan_report(PLAN, Tiny(), dataclasses.replace(FACTS, way=foreseen))
    assert report["way"] == {
        "way": "recompute",
        "cost": "every token costs a pass",
        "reasons": ("not paged: so",),
    }
    assert "served the recompute way: every token costs a pass" in as_text(report)
    none = plan_report(PLAN, Tiny(), dataclasses.replace(FACTS, way=Foreseen("none", "", ("not paged: so",))))
    assert "cannot be served: not paged: so" in as_text(none)
    assert plan_report(PLAN, Tiny(), FACTS)["way"] is None
