"""Fused decoders give transformers' logits over pages, in prefill, chunks and decoding, or are put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from shoal.attention.cpu import CpuPaged
from shoal.comm.local import LocalComm
from shoal.fuse import replace
from shoal.fuse.build import LayerDraft
from shoal.fuse.modules import PackedModules, pack_modules
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

    def pack(module: PreTrainedModel, run: Callable[[], object]) -> PackedModules:
        return pack_modules(module, run, kernel.team, LocalComm(), storage)

    return serve_causal(model, kernel, CPU, fuse, pack)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_served_fused_with_its_own_logits(family: str, kernel: CpuPaged) -> None:
    chosen = served(zoo_model(family), kernel)
    assert chosen.notes[0] == "2 of 2 layers fused, 1 call(s) a step"
    assert chosen.notes[-1] == "served the fused way"
    assert len(chosen.model.kv_shapes) == 2


def test_a_bfloat16_model_is_served_fused(kernel: CpuPaged) -> None:
    chosen = served(zoo_model("llama", torch.bfloat16), kernel, "bfloat16")
    assert isinstance(chosen.model, FusedCausal) and chosen.model.num_fused == 2


def test_a_model_that_computes_parts_for_itself_says_which(kernel: CpuPaged) -> None:
    assert "within them by the model's own code: mlp" in served(zoo_model("mixtral"), kernel).notes


def test_a_model_of_which_no_layer_is_fused_is_served_as_it_was_but_for_its_linears(kernel: CpuPaged) -> None:
    model = zoo_model("olmo")  # it bounds its queries
    held = sum(parameter.nbytes for parameter in model.parameters())
    chosen = served(model, kernel)
    assert chosen.model.way == "paged"
    assert any("model.layers.0: where its query comes from is not seen" in note for note in chosen.notes)
    assert "14 linears packed" in chosen.notes
    assert model.lm_head.weight.numel() == 0
    left = sum(parameter.nbytes for parameter in model.parameters())
    assert held <= left + chosen.packed_bytes < 1.1 * held


@pytest.mark.parametrize(("family", "count"), [("bloom", 8), ("falcon", 8), ("mpt", 8), ("gpt-neo", 12)])
def test_linears_of_models_on_the_padded_way_are_packed(family: str, count: int, kernel: CpuPaged) -> None:
    chosen = served(zoo_model(family), kernel)
    assert chosen.notes[-2:] == (f"{count} linears packed", "served the padded way")
    assert chosen.packed_bytes > 0


def test_what_fused_layers_leave_to_their_own_code_is_packed(kernel: CpuPaged) -> None:
    model = zoo_model("qwen2-moe")
    chosen = served(model, kernel)
    assert chosen.notes[0] == "2 of 2 layers fused, 1 call(s) a step"
    assert chosen.notes[-2:] == ("6 linears packed", "served the fused way")
    assert isinstance(chosen.model, FusedCausal) and chosen.packed_bytes > chosen.model.num_bytes
    assert model.model.layers[0].mlp.shared_expert.up_proj.weight.numel() == 0


@pytest.mark.parametrize(
    ("read", "reason"),
    [(lambda weight: 1 + weight.sum(), "logits"), (lambda weight: weight[0], "IndexError")],
)
def test_linears_whose_weight_other_code_reads_are_put_back(
    read: Callable[[torch.Tensor], torch.Tensor], reason: str, kernel: CpuPaged
) -> None:
    model = zoo_model("bloom")
    dense = model.transformer.h[1].self_attention.dense
    own = model.transformer.h[0].mlp.forward
    model.transformer.h[0].mlp.forward = lambda *args: own(*args) * read(dense.weight)
    chosen = served(model, kernel)
    assert any(note.startswith(f"no linear packed: {reason}") for note in chosen.notes)
    assert chosen.notes[-1] == "served the padded way" and chosen.packed_bytes == 0
    assert dense.weight.numel() == 64 * 64 and "forward" not in vars(dense)
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
    assert model.num_bytes < share * whole.num_bytes
    assert any(note.startswith("logits differ by ") for note in chosen.notes)


def test_rounded_linears_outside_fused_layers_are_reported_too(kernel: CpuPaged) -> None:
    whole, chosen = served(zoo_model("bloom"), kernel), served(zoo_model("bloom"), kernel, "int8")
    assert chosen.packed_bytes < 0.35 * whole.packed_bytes
    assert any(note.startswith("with them, logits differ by ") for note in chosen.notes)


def test_a_prompt_without_pages_of_its_own_leaves_the_engines_pages_alone(kernel: CpuPaged) -> None:
    model = served(zoo_model("llama"), kernel).model
    ids, every = torch.arange(3, 30), torch.arange(27)
    with torch.inference_mode():
        first = model.plain(ids, every)
        assert torch.equal(model.plain(ids, every), first)
    assert first.shape == (27, 101)
