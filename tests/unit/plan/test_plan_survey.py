"""As much of a model's code as can be reached is recorded, and what refuses gradients is followed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from shoal.plan.derive import derive
from shoal.plan.inline import inlined, refusing_function
from shoal.plan.naming import Naming
from shoal.plan.skeleton import build_probe
from shoal.plan.survey import data_flow, survey
from shoal.prove import prove


class Refusing(Function):
    """Is only made for training."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise AssertionError("only while training")


class Fed(nn.Module):
    """Two linears with an activation between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Model(nn.Module):
    """What is long goes through other weights; so does what is special."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, 16)
        self.norm = nn.LayerNorm(16)
        self.short, self.long, self.special = Fed(32), Fed(32), Fed(32)
        self.head = nn.Linear(16, config.vocab_size)

    def forward(
        self, input_ids: torch.Tensor, global_attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.norm(self.embed(input_ids))
        x = self.norm(x + (self.long if x.shape[1] > self.config.most else self.short)(x))
        if global_attention_mask is not None:
            x = self.norm(x + global_attention_mask.unsqueeze(-1) * self.special(x))
        return self.head(x)


class Reversible(Model):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.norm(self.embed(input_ids))
        x = self.norm(x + Refusing.apply(x, self.short))
        return self.head(x)


def config_of(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(vocab_size=37, hidden_size=16, **more)


def test_special_and_long_batches_are_recorded_beside_the_plain_ones() -> None:
    config = config_of(most=10, attention_chunk=10)
    found = survey(build_probe(Model, config), config)
    used = [{call.weight.partition(".")[0] for call in entry.calls} for entry in found.recordings]
    assert "special" in used[0]
    assert any("special" not in names for names in used)
    assert "long" in used[-1] and "short" not in used[-1]
    assert found.long_tokens == 40


def test_weights_that_only_special_inputs_use_are_split_and_proved_with_them() -> None:
    config = config_of(most=11)
    plan = derive(Model, config, 2)
    assert plan.params["special.up.weight"].op == "column"
    assert plan.params["special.down.weight"].op == "row"
    prove(plan, Model, config)


def test_weights_that_no_recording_used_are_whole_on_every_rank() -> None:
    plan = derive(Model, config_of(most=11), 2)
    assert plan.evidence["long_tokens"] == 0
    splits = [plan.params[f"long.{name}.weight"] for name in ("up", "down")]
    assert {(split.op, split.reason) for split in splits} == {("replicate", "no run of the model used it")}


def test_a_function_that_refuses_gradients_is_followed_through_its_forward() -> None:
    config = config_of()
    (consumer,) = data_flow(build_probe(Reversible, config), config, Naming()).consumers
    assert consumer.call.weight == "short.down.weight"
    assert set(consumer.cones) == {"short.up.weight"}


def test_functions_are_inline_only_within_and_the_one_that_refuses_is_found() -> None:
    x, module = torch.ones(2, 16, requires_grad=True), Fed(4)
    with inlined([Refusing]):
        Refusing.apply(x, module).sum().backward()
    assert x.grad is not None
    try:
        Refusing.apply(x, module).sum().backward()
    except AssertionError as error:
        assert refusing_function(error) is Refusing
    else:
        raise AssertionError("the function is still inline")
