"""Fused layers of every listed family prove equal and can be undone; what is not proved stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import EngineError
from shoal.fuse import replace
from shoal.fuse.recipe import Attend, Gate, LayerRecipe
from shoal.fuse.replace import FusedLayers
from shoal.jit.team import Team
from support.fusing import Ready, fuse, ready, zoo_model

FAMILIES = [
    "llama", "llama:9q3kv", "llama:biased", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gpt-neox",
    "gpt-neox:sequential", "gpt2", "opt", "opt:350m", "starcoder2", "gemma2", "gemma3_text", "phi", "glm",
    "granite", "olmo", "olmo2", "smollm3", "gpt-j", "codegen", "mixtral", "qwen2-moe", "gpt_oss", "olmoe",
]  # fmt: skip


def plain_logits(parts: Ready) -> torch.Tensor:
    """Of a prompt, without pages."""
    with torch.inference_mode():
        return parts.model(input_ids=torch.arange(3, 12)[None], use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_of_a_listed_family_are_fused_into_one_call(family: str, team: Team) -> None:
    model = zoo_model(family)
    if family == "olmo":
        model.config.clip_qkv = None  # the layer below has it
    fused = fuse(ready(model, team))
    assert fused.problems == []
    assert (fused.num_fused, fused.num_stacks) == (2, 1)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "gpt-neox", "phi3", "mixtral"])
def test_restored_layers_give_the_very_same_logits(family: str, team: Team) -> None:
    parts = ready(zoo_model(family), team)
    before = plain_logits(parts)
    fused = fuse(parts)
    assert fused.num_fused == 2
    with pytest.raises(EngineError, match="over pages only"):
        plain_logits(parts)
    fused.restore()
    # Weights that were packed times a factor (opt's queries) come back rounded once.
    assert torch.allclose(plain_logits(parts), before, rtol=1e-6, atol=1e-6)


def test_packed_weights_are_held_once(team: Team) -> None:
    parts = ready(zoo_model("llama"), team)
    linears = [module for module in parts.model.model.layers.modules() if isinstance(module, nn.Linear)]
    held = sum(linear.weight.nbytes for linear in linears)
    fused = fuse(parts)
    assert fused.num_bytes >= held, "panels are filled up"
    assert sum(linear.weight.nbytes for linear in linears) == 0


def test_half_as_many_bytes_are_held_in_bfloat16(team: Team) -> None:
    whole = fuse(ready(zoo_model("llama"), team)).num_bytes
    parts = ready(zoo_model("llama", torch.bfloat16), team)
    fused = fuse(parts, "bfloat16")
    assert (fused.num_fused, fused.num_bytes) == (2, whole // 2)


def test_an_odd_layer_runs_by_itself_between_two_stacks(team: Team) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    model.model.layers[1].register_forward_hook(lambda module, args, out: None)
    fused = fuse(ready(model, team))
    assert (fused.num_fused, fused.num_stacks) == (2, 2)
    assert fused.problems == ["model.layers.1: the layer has hooks"]


def test_a_layer_whose_code_scales_its_input_is_fused_with_the_factor(team: Team) -> None:
    model = zoo_model("llama")
    forward = model.model.layers[1].forward
    model.model.layers[1].forward = lambda hidden, **kwargs: forward(hidden * 2, **kwargs)
    fused = fuse(ready(model, team))
    assert (fused.num_fused, fused.num_stacks, fused.problems) == (2, 1, [])


def attends(fused: FusedLayers) -> list[Attend]:
    steps = [step for chain in fused._chains for ready in chain.ready for step in ready.recipe.steps]
    return [step for step in steps if isinstance(step, Attend)]


def test_windows_of_layers_in_turn_are_each_layers_own(team: Team) -> None:
    """Though the second is supposed to be like the first, and no proof is as long as a window."""
    model = zoo_model("gemma2")
    assert [kind.split("_")[0] for kind in model.config.layer_types] == ["sliding", "full"]
    fused = fuse(ready(model, team))
    assert [step.variant.window for step in attends(fused)] == [model.config.sliding_window, None]


def test_a_layer_unlike_the_one_before_is_recognised_for_itself(team: Team) -> None:
    model = zoo_model("llama")
    model.model.layers[1].mlp.act_fn = nn.GELU()
    fused = fuse(ready(model, team))
    assert fused.problems == []
    gates = [
        step.activation
        for chain in fused._chains
        for one in chain.ready
        for step in one.recipe.steps
        if isinstance(step, Gate)
    ]
    assert gates == ["silu", "gelu"]


def test_layers_of_a_kind_are_recognised_once(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    recognise = replace.recognise

    def counting(*arguments: Any) -> LayerRecipe:
        calls.append(arguments)
        return recognise(*arguments)

    monkeypatch.setattr(replace, "recognise", counting)
    assert fuse(ready(zoo_model("llama"), team)).num_fused == 2
    assert len(calls) == 1


def clipped(layer: Any) -> None:
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs).clamp(-0.5, 0.5)


def raising(layer: Any) -> None:
    calls = iter(range(100))
    forward = layer.forward

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        if next(calls) > 1:  # the model's own runs pass
            raise RuntimeError("not alone")
        return forward(*args, **kwargs)

    layer.forward = sometimes


@pytest.mark.parametrize(
    ("change", "reason"), [(clipped, "no sum of what is known"), (raising, "RuntimeError: not alone")]
)
def test_a_changed_layer_is_left_alone_with_a_reason(
    change: Callable[[Any], None], reason: str, team: Team
) -> None:
    model = zoo_model("llama")
    change(model.model.layers[0])
    fused = fuse(ready(model, team))
    assert fused.num_fused == 1
    assert fused.problems[0].startswith("model.layers.0: ") and reason in fused.problems[0]
    assert "forward" in vars(model.model.layers[0]), "its own is still there"


@pytest.mark.parametrize(
    ("bound", "reason"), [(1.0, "its query comes from"), (7.0, "as recognised it differs")]
)
def test_a_bound_on_queries_is_found_out_even_where_ordinary_input_does_not_meet_it(
    bound: float, reason: str, team: Team
) -> None:
    model = zoo_model("olmo")
    model.config.clip_qkv = bound
    fused = fuse(ready(model, team))
    assert fused.num_fused == 0
    assert reason in fused.problems[0]


def test_what_is_recognised_but_does_not_prove_is_left_alone(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replace, "difference", lambda *_: 3e-4)
    parts = ready(zoo_model("llama"), team)
    before = plain_logits(parts)
    fused = fuse(parts)
    assert fused.num_fused == 0
    assert fused.problems[0] == "model.layers.0: as recognised it differs by 3.0e-04"
    assert torch.equal(plain_logits(parts), before)
