"""A model whose parts are seen in a run is put together from them, and not if it does anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from shoal.attention.cpu import CpuPaged
from shoal.attention.pages import allocate
from shoal.comm.local import LocalComm
from shoal.cpu_kernels.norm import Norm
from shoal.fuse.whole import WholeModel
from shoal.jit.team import Team
from shoal.model.base import Ragged, Row
from shoal.model.causal import PagedCausal, attention_batch
from shoal.model.fused import FusedCausal
from support.fusing import zoo_model

F32 = torch.float32


@torch.inference_mode()
def fused(model: PreTrainedModel, team: Team, storage: str = "float32") -> FusedCausal:
    kernel = CpuPaged(team)
    paged = PagedCausal(model, kernel)
    paged.plain(torch.arange(3, 12), torch.tensor([8]))
    return FusedCausal(model, paged, kernel, LocalComm(), storage)


def whole_of(model: FusedCausal) -> WholeModel | None:
    return model._whole


def decoding(position: int) -> Ragged:
    """One token, whose keys and values go to block 0."""
    at = torch.tensor([position])
    return Ragged(at + 5, at, at, [Row(0, 1, position, torch.tensor([0, 1]))], torch.tensor([0]), 16)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", F32), ("gemma3_text", F32), ("gpt-neox", F32), ("llama", torch.bfloat16)],
)
@torch.inference_mode()
def test_it_gives_the_logits_that_the_models_own_code_gives(
    family: str, dtype: torch.dtype, team: Team
) -> None:
    storage = "float32" if dtype is torch.float32 else "bfloat16"
    model = fused(zoo_model(family, dtype), team, storage)
    whole = whole_of(model)
    assert whole is not None and isinstance(whole.norm, Norm) == (dtype is torch.float32)
    ids, wanted = torch.arange(20, 40), torch.tensor([4, 19])
    prompt = Ragged(
        ids, torch.arange(20), torch.arange(20), [Row(0, 20, 0, torch.tensor([0, 1]))], wanted, 16
    )
    model.use_pages(allocate(model.kv_shapes, 2, 16, dtype, torch.device("cpu")))
    for batch in (prompt, decoding(20), decoding(21)):
        want = model._paged.logits(batch).clone()
        got = whole(batch.ids, batch.positions, batch.wanted, attention_batch(batch))
        assert got.dtype is want.dtype
        assert torch.allclose(got, want, atol=1e-5 * float(want.abs().max()))


@torch.inference_mode()
def test_the_models_own_code_is_not_called_any_more(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fused(zoo_model("llama"), team)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the model's own forward is called")

    monkeypatch.setattr(type(model._paged._call.module.model), "forward", refuse)
    assert model.plain(torch.arange(5), torch.tensor([4])).isfinite().all()
    assert "embedding, layers and head run without the model's own code" in model.notes
    model.restore()
    with pytest.raises(AssertionError, match="own forward"):
        model.plain(torch.arange(5), torch.tensor([4]))


def change_output(model: PreTrainedModel, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Have the model's code do something to what a module gives, unseen by the module's hooks."""
    module = model.get_submodule(name)
    call = module.__call__

    class Changed(type(module)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return change(call(*args, **kwargs))

    module.__class__ = Changed


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("model.embed_tokens", lambda x: x + 1, "where what its layers are given comes from is not seen"),
        ("model.norm", lambda x: x.tanh(), "what is between its layers and its head is not seen"),
        ("lm_head", lambda x: x.tanh(), "where its logits comes from is not seen"),
        ("model.rotary_emb", lambda pair: (pair[0] + 0, pair[1] + 0), "where its rotary tables come from"),
    ],
)
@torch.inference_mode()
def test_what_is_done_in_between_is_noticed(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], problem: str, team: Team
) -> None:
    model = zoo_model("llama")
    change_output(model, name, change)
    served = fused(model, team)
    assert whole_of(served) is None
    assert any(problem in note for note in served.notes)


@torch.inference_mode()
def test_factors_on_the_way_are_found(team: Team) -> None:
    model = zoo_model("granite")
    model.model.embedding_multiplier = 3.0
    model.config.logits_scaling = 8.0
    whole = whole_of(fused(model, team))
    assert whole is not None
    assert (whole.factor, whole.logits_factor) == (pytest.approx(3.0), pytest.approx(0.125))


@torch.inference_mode()
def test_a_model_with_learned_positions_keeps_its_own_code(team: Team) -> None:
    served = fused(zoo_model("gpt2"), team)
    assert whole_of(served) is None
    assert served.plain(torch.arange(5), torch.tensor([4])).isfinite().all()
