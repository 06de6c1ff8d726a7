"""Linears outside fused layers compute the same over packed weights, on one rank and several, and go back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shoal.comm.base import Comm
from shoal.comm.local import LocalComm
from shoal.comm.simulated import run_ranks
from shoal.fuse.common import is_linear
from shoal.fuse.match import is_close
from shoal.fuse.modules import PackedModules, pack_modules
from shoal.jit.team import Team
from shoal.shard import shard
from shoal.shard.layers import Adopter, set_features
from shoal.shard.link import Link
from support.fusing import planned, zoo_model

FAMILIES = ["bloom", "falcon", "mpt", "gpt-neo", "gpt2", "deepseek_v2", "stablelm", "cohere", "qwen2-moe"]
IDS = torch.arange(3, 12)[None]


class Parts(nn.Module):
    """Linears of several kinds side by side, and one that is not called."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(width, 40), nn.Linear(40, 33, bias=False)
        self.conv, self.unused = Conv1D(20, 33), nn.Linear(24, 24)
        self.conv.bias.data = torch.randn(20)
        self.dtype = torch.float32
        self.requires_grad_(False)

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.second(self.first(x)))


X = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def packed(model: Any, team: Team, storage: str = "float32", comm: Comm | None = None) -> PackedModules:
    def run() -> object:
        return model(X) if isinstance(model, Parts) else logits(model)

    return pack_modules(model, run, team, comm or LocalComm(), storage)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {path: m.weight for path, m in model.named_modules() if is_linear(m)}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_familys_logits_stay_with_every_called_linear_packed(family: str, team: Team) -> None:
    model = zoo_model(family)
    expected = logits(model)
    wide = {path for path, weight in weights(model).items() if min(weight.shape) >= 16}
    done = packed(model, team)
    freed = {path for path, weight in weights(model).items() if weight.numel() == 0}
    assert freed == wide and done.num_linears == len(wide - {"lm_head"})
    assert f"{done.num_linears} linears packed" in done.notes
    assert is_close(logits(model), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["bloom", "gpt2", "deepseek_v2"])
def test_restored_linears_give_the_very_same_logits(family: str, dtype: torch.dtype, team: Team) -> None:
    model = zoo_model(family, dtype)
    before = logits(model)
    done = packed(model, team)
    assert torch.allclose(logits(model).float(), before.float(), atol=0.1, rtol=0.05)
    done.restore()
    assert torch.equal(logits(model), before)
    assert (done.num_linears, done.num_bytes) == (0, 0)
    assert not any("forward" in vars(module) for module in model.modules())


def test_weights_of_each_dtype_are_held_once_in_it(team: Team) -> None:
    model = Parts()
    model.second.bfloat16()
    model.forward = lambda x: model.second(model.first(x).bfloat16())
    expected = model(X)
    done = packed(model, team)
    assert done.num_linears == 2
    padded = 48 * (24 * 4 + 4) + 48 * 40 * 2  # 40 and 33 features fill 48; one bias
    assert done.num_bytes == padded
    assert model(X).dtype is torch.bfloat16
    assert torch.allclose(model(X).float(), expected.float(), atol=0.02, rtol=0.02)


def test_a_linear_that_is_not_called_keeps_its_weight(team: Team) -> None:
    model = Parts()
    assert packed(model, team).num_linears == 3
    assert model.unused.weight.numel() == 24 * 24 and "forward" not in vars(model.unused)


def hooked(model: Parts) -> None:
    model.second.register_forward_hook(lambda module, args, out: out)


def overridden(model: Parts) -> None:
    model.second.forward = lambda x: functional.linear(x, model.second.weight)


def shared(model: Parts) -> None:
    model.unused.weight = model.second.weight


def called_by_keyword(model: Parts) -> None:
    model.forward = lambda x: model.conv(model.second(input=model.first(x)))


@pytest.mark.parametrize("change", [hooked, overridden, shared, called_by_keyword])
def test_a_linear_that_others_have_to_do_with_is_left_alone(
    change: Callable[[Parts], None], team: Team
) -> None:
    model = Parts()
    change(model)
    expected = model(X)
    assert packed(model, team).num_linears == 2
    assert model.second.weight.numel() == 33 * 40
    assert is_close(model(X), expected)


def test_narrow_linears_are_left_alone_and_the_model_is_not_run(team: Team) -> None:
    model = Parts(width=24)
    model.first, model.second, model.conv = nn.Linear(24, 15), nn.Linear(15, 33), nn.Linear(33, 4)
    del model.unused
    runs: list[int] = []
    done = pack_modules(model, lambda: runs.append(1), team, LocalComm(), "float32")
    assert (done.num_linears, done.num_bytes, done.notes, runs) == (0, 0, (), [])


class Bounded(nn.Linear):
    """A linear that does more than its weight says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias).clamp(-2, 2)


class BoundedAround(nn.Linear):
    """The same, and one sees it in the code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(-2, 2)


class Grouped(nn.Linear):
    """Takes other shapes than a linear does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.matmul(x.reshape(*X.shape[:-1], 40, 1)).squeeze(-1)


@pytest.mark.parametrize(("kind", "is_tried"), [(Bounded, True), (BoundedAround, False), (Grouped, True)])
def test_a_linear_with_code_of_its_own_stays(kind: type[nn.Linear], is_tried: bool, team: Team) -> None:
    model = Parts()
    model.second = kind(40, 33).requires_grad_(False)
    expected = model(X)
    done = packed(model, team)
    assert done.num_linears == 2 and model.second.weight.numel() == 33 * 40
    assert any(note.startswith("not packed: second differs by ") for note in done.notes) == is_tried
    assert is_close(model(X), expected)


@pytest.mark.parametrize(("storage", "share"), [("int8", 0.35), ("int4", 0.3)])
def test_weights_are_whole_until_they_are_rounded(storage: str, share: float, team: Team) -> None:
    model = zoo_model("bloom")
    expected = logits(model)
    done = packed(model, team, storage)
    assert done.is_rounded and is_close(logits(model), expected)
    whole, count = done.num_bytes, done.num_linears
    done.round()
    assert done.num_linears == count and done.num_bytes < share * whole
    gap = (logits(model) - expected).abs().max() / expected.abs().max()
    assert 1e-4 < gap < 0.5


@pytest.mark.parametrize("family", ["bloom", "falcon", "gpt2", "deepseek_v2", "cohere"])
def test_parts_of_two_ranks_keep_their_sums(family: str) -> None:
    plan, expected = planned(family, 2), logits(zoo_model(family))

    def rank(comm: Comm) -> tuple[int, torch.Tensor, torch.Tensor]:
        own, model = Team(1), zoo_model(family)
        try:
            shard(model, plan, comm.rank, comm)
            done = packed(model, own, comm=comm)
            count, got = done.num_linears, logits(model)
            done.restore()
            return count, got, logits(model)
        finally:
            own.close()

    (count, got, again), (other, *_) = run_ranks(2, rank)
    assert count == other > 0
    assert is_close(got, expected) and is_close(again, expected)


def split(module: nn.Module, kind: str, comm: Comm) -> None:
    """A rank's half of a linear, with the collective that makes it whole."""
    adopter, is_row = Adopter(Link(comm)), kind == "row"
    rows = module.weight.T if isinstance(module, Conv1D) else module.weight
    half = rows.chunk(2, int(is_row))[comm.rank]
    module.weight.data = (half.T if isinstance(module, Conv1D) else half).contiguous()
    if is_row:
        adopter.reduce_outputs(module)
    else:
        module.bias.data = module.bias.chunk(2)[comm.rank]
        adopter.gather_outputs(module, [len(half)] * 2)
    set_features(module)


@pytest.mark.parametrize("kind", ["row", "gather"])
@pytest.mark.parametrize("make", [lambda: nn.Linear(64, 48), lambda: Conv1D(48, 64)])
def test_biases_are_added_once_and_parts_gathered(kind: str, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    whole, x = make(), torch.randn(3, 64)
    whole.bias.data = torch.randn(48)
    state = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    models = [Parts(), Parts()]  # not by the ranks, which as threads share torch's seed

    def rank(comm: Comm) -> tuple[int, torch.Tensor]:
        own, model = Team(1), models[comm.rank]
        try:
            model.only = make()
            model.only.load_state_dict(state)
            split(model.only, kind, comm)
            mine = x.chunk(2, 1)[comm.rank] if kind == "row" else x
            model.forward = lambda _: model.only(mine)
            count = packed(model, own, comm=comm).num_linears
            with torch.inference_mode():
                return count, model(X)
        finally:
            own.close()

    for count, got in run_ranks(2, rank):
        assert count == 1
        assert is_close(got, whole(x).detach())


def test_what_does_not_prove_on_one_rank_is_packed_on_none() -> None:
    models = [Parts(), Parts()]  # not by the ranks, which as threads share torch's seed

    def rank(comm: Comm) -> tuple[int, int, torch.Tensor]:
        own, model = Team(1), models[comm.rank]
        try:
            if comm.rank == 1:
                bounded = Bounded(40, 33, bias=False)
                bounded.weight = model.second.weight
                model.second = bounded
            count = packed(model, own, comm=comm).num_linears
            return count, model.second.weight.numel(), model(X)
        finally:
            own.close()

    first, second = run_ranks(2, rank)
    assert first[:2] == second[:2] == (2, 33 * 40)
    assert is_close(first[2], Parts()(X).detach())
