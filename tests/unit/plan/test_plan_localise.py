"""Code made rank-local: which integers and widths are changed, and that no others are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import PlanError
from shoal.plan.derive import derive
from shoal.plan.types import Plan
from shoal.prove import prove

SIZE = 8  # features of a head


class Attention(nn.Module):
    """Self-attention over heads; subclasses say how the heads come out of the projections and go back."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads, self.num_kv = config.heads, config.kv_heads
        self.chunk = config.heads  # the same number by chance
        self.q = nn.Linear(config.hidden, self.num_heads * SIZE)
        self.kv = nn.Linear(config.hidden, 2 * self.num_kv * SIZE)
        self.out = nn.Linear(self.num_heads * SIZE, config.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q = self.q(x).view(batch, tokens, self.num_heads, SIZE).transpose(1, 2)
        k, v = self.kv(x).view(batch, tokens, 2, self.num_kv, SIZE).permute(2, 0, 3, 1, 4)
        return self.out(self.joined(x, self.mixed(q, k, v)))

    def mixed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (t.repeat_interleave(self.num_heads // self.num_kv, 1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2)).softmax(-1) / self.chunk
        scores = scores * torch.ones(self.chunk).sum()
        return (scores @ v).transpose(1, 2)

    def joined(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        return mixed.reshape(*x.shape[:2], self.num_heads * SIZE)


class WidthOfInput(Attention):
    def joined(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.size()
        assert width == self.out.in_features or width == self.out.out_features
        return mixed.reshape(batch, tokens, width)


class FreeSize(Attention):
    """The whole width fits a rank's part of an even number of tokens."""

    def joined(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        return mixed.reshape(-1, x.size(-1)).view(*x.shape[:2], -1)[..., : x.size(-1)]


class Grouped(nn.Module):
    """Heads two by two in a fused projection: [q q | k k | v v] per group."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.group = 2
        self.qkv = nn.Linear(config.hidden, 3 * config.heads * SIZE)
        self.out = nn.Linear(config.heads * SIZE, config.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        grouped = self.qkv(x).view(batch, tokens, -1, 3 * self.group * SIZE)
        q, k, v = (
            part.reshape(batch, tokens, -1, SIZE).transpose(1, 2)
            for part in grouped.split(self.group * SIZE, -1)
        )
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class Drawn(Attention):
    """Each head hashes by rotations of its own, drawn when they are needed."""

    def mixed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rotations = torch.randn(self.num_heads, SIZE, 1, dtype=q.dtype)
        return super().mixed(q * (q @ rotations).sign(), k, v)


class Model(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        self.norm = nn.LayerNorm(config.hidden)
        self.layers = nn.ModuleList(config.attention(config) for _ in range(2))
        self.head = nn.Linear(config.hidden, config.vocab_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return self.head(self.norm(x))


def config_of(attention: type[nn.Module], heads: int = 4, kv_heads: int = 4) -> SimpleNamespace:
    return SimpleNamespace(
        attention=attention, hidden=heads * SIZE, heads=heads, kv_heads=kv_heads, vocab_size=37, depth=2
    )


def planned(attention: type[nn.Module], tp: int, **sizes: int) -> Plan:
    config = config_of(attention, **sizes)
    plan = derive(Model, config, tp)
    prove(plan, Model, config)
    return plan


def operations(plan: Plan) -> set[str]:
    return {split.op for name, split in plan.params.items() if ".*." in name}


def test_an_unrelated_integer_of_the_same_value_is_not_changed() -> None:
    plan = planned(Attention, 2)
    assert operations(plan) == {"column", "row"}
    assert {(patch.attribute, patch.values) for patch in plan.patches} == {
        ("num_heads", (2, 2)),
        ("num_kv", (2, 2)),
    }


@pytest.mark.parametrize(("tp", "heads", "kv_heads"), [(3, 4, 4), (2, 9, 3), (4, 9, 3), (3, 6, 2)])
def test_two_integers_that_differ_from_rank_to_rank_are_found_together(
    tp: int, heads: int, kv_heads: int
) -> None:
    plan = planned(Attention, tp, heads=heads, kv_heads=kv_heads)
    assert operations(plan) == {"column", "row"}
    values = {patch.attribute: patch.values for patch in plan.patches}
    assert sum(values["num_heads"]) == heads
    assert sum(values.get("num_kv", (kv_heads,))) >= kv_heads


def test_a_width_read_from_the_input_becomes_a_repaired_reshape() -> None:
    plan = planned(WidthOfInput, 2)
    assert operations(plan) == {"column", "row"}
    (entry,) = plan.reshapes
    assert (entry.module, entry.old, entry.values) == ("layers.*", 32, (16, 16))
    assert {patch.attribute for patch in plan.patches} == {"num_heads", "num_kv"}


def test_a_wrong_width_that_fits_some_numbers_of_tokens_is_refused_by_the_proof() -> None:
    config = config_of(FreeSize)
    plan = derive(Model, config, 2)
    assert not plan.reshapes
    with pytest.raises(PlanError, match=r"layers\.\*\.out.weight.*its proof fails"):
        prove(plan, Model, config)


def test_heads_that_the_code_holds_in_groups_are_dealt_in_groups() -> None:
    plan = planned(Grouped, 3, heads=8)
    assert plan.regions[0].shares == (4, 2, 2)
    assert not plan.patches


def test_numbers_drawn_per_head_forbid_the_split_and_the_plan_says_so() -> None:
    plan = planned(Drawn, 2)
    split = plan.params["layers.*.out.weight"]
    assert split.op == "gather"
    assert "torch.randn draws numbers for 4 num_heads" in split.reason
    assert plan.evidence["draws"] == "randn"
