"""Fused decoders give transformers' logits over pages, in prefill, chunks and decoding, or are put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from shoal.attention.cpu import CpuPaged
from shoal.comm.local import LocalComm
from shoal.fuse import replace
from shoal.fuse.build import LayerDraft
from shoal.fuse.recipe import Combine, LayerRecipe
from shoal.jit.team import Team
from shoal.model.causal import PagedCausal
from shoal.model.choose import Chosen, serve_causal
from shoal.model.fused import FusedCausal
from support.fusing import zoo_model

CPU = torch.device("cpu")
FAMILIES = [
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gpt-neox", "gpt-neox:sequential", "gpt2", "opt",
    "opt:350m", "starcoder2", "gemma2", "gemma3_text", "phi", "glm", "granite", "olmo2", "smollm3", "gpt-j",
    "codegen", "mixtral", "gpt_oss",
]  # fmt: skip


@pytest.fixture(scope="module")
def kernel() -> Iterator[CpuPaged]:
    team = Team(1)
    yield CpuPaged(team)
    team.close()


@torch.inference_mode()
def served(model: PreTrainedModel, kernel: CpuPaged, storage: str = "float32") -> Chosen:
    """Chosen as a rank does: logits are held against transformers' own, within the dtype's tolerance."""

    def fuse(module: PreTrainedModel, paged: PagedCausal) -> FusedCausal:
        return FusedCausal(module, paged, kernel, LocalComm(), storage)

    return serve_causal(model, kernel, CPU, fuse)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_served_fused_with_its_own_logits(family: str, kernel: CpuPaged) -> None:
    chosen = served(zoo_model(family), kernel)
    assert chosen.notes[0] == "2 of 2 layers fused, 1 call(s) a step"
    assert chosen.notes[-1] == "served the fused way"
    assert len(chosen.model.kv_shapes) == 2


def test_a_bfloat16_model_is_served_fused(kernel: CpuPaged) -> None:
    chosen = served(zoo_model("llama", torch.bfloat16), kernel, "bfloat16")
    assert isinstance(chosen.model, FusedCausal) and chosen.model.layers_fused == 2


def test_a_model_that_computes_parts_for_itself_says_which(kernel: CpuPaged) -> None:
    assert "within them by the model's own code: mlp" in served(zoo_model("mixtral"), kernel).notes


def test_a_model_of_which_nothing_is_fused_is_served_as_it_was(kernel: CpuPaged) -> None:
    model = zoo_model("olmo")  # it bounds its queries
    chosen = served(model, kernel)
    assert chosen.model.way == "paged"
    assert any("model.layers.0: where its query comes from is not seen" in note for note in chosen.notes)
    assert model.lm_head.weight.numel() > 0


def test_wrong_fused_layers_are_found_out_by_the_logits_and_put_back(
    kernel: CpuPaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers whose residuals are missing, and a proof that lets them pass."""
    draft_layer = replace.draft_layer

    def without_residuals(recipe: LayerRecipe, *rest: Any) -> LayerDraft:
        steps = tuple(
            Combine(step.out, step.terms[1:]) if isinstance(step, Combine) else step for step in recipe.steps
        )
        return draft_layer(LayerRecipe(steps, recipe.output, recipe.is_tuple, recipe.tables), *rest)

    monkeypatch.setattr(replace, "difference", lambda *_: 0.0)
    monkeypatch.setattr(replace, "draft_layer", without_residuals)
    chosen = served(zoo_model("llama"), kernel)
    assert chosen.model.way == "paged"
    assert any(note.startswith("not fused: logits") for note in chosen.notes)


@pytest.mark.parametrize(("storage", "share"), [("int8", 0.3), ("int4", 0.25)])
def test_rounded_weights_are_served_and_their_difference_is_reported(
    storage: str, share: float, kernel: CpuPaged
) -> None:
    whole = served(zoo_model("llama"), kernel).model
    chosen = served(zoo_model("llama"), kernel, storage)
    model = chosen.model
    assert isinstance(model, FusedCausal) and isinstance(whole, FusedCausal)
    assert model.packed_bytes < share * whole.packed_bytes
    assert any(note.startswith("logits differ by ") for note in chosen.notes)


def test_a_prompt_without_pages_of_its_own_leaves_the_engines_pages_alone(kernel: CpuPaged) -> None:
    model = served(zoo_model("llama"), kernel).model
    ids, every = torch.arange(3, 30), torch.arange(27)
    with torch.inference_mode():
        first = model.plain(ids, every)
        assert torch.equal(model.plain(ids, every), first)
    assert first.shape == (27, 101)
