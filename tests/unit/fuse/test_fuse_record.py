"""Runs of a layer note what went through its parts, and leave the model as it was."""

from __future__ import annotations

import pytest
import torch

from shoal.attention.hook import AttentionContext
from shoal.fuse.record import LayerCall, rows_of, run_layer
from shoal.jit.team import Team
from support.fusing import TOKENS, layer_call, ready, zoo_model

LLAMA = "model.layers.0"


def pair(first: torch.Tensor, second: torch.Tensor) -> LayerCall:
    return LayerCall(
        (torch.zeros(1, 4, 8),), {"tables": (first[None], second[None]), "other": torch.arange(4)}
    )


def test_hidden_states_are_found_and_replaced_by_place_or_by_name() -> None:
    new = torch.ones(1, 4, 8)
    by_name = LayerCall((), {"hidden_states": torch.zeros(1, 4, 8)}).with_hidden(new)
    by_place = LayerCall((torch.zeros(1, 4, 8), "mask"), {}).with_hidden(new)
    assert by_name.hidden is new and by_place.hidden is new
    assert by_place.args[1] == "mask"


def test_at_position_0_cosines_are_1_and_sines_0_in_either_order() -> None:
    angles = torch.arange(4.0)[:, None] * torch.tensor([1.0, 0.1])
    for call in (pair(angles.cos(), angles.sin()), pair(angles.sin(), angles.cos())):
        assert call.tables == "tables"
        first, second = call.unrotated().kwargs["tables"]
        cos, sin = (second, first) if call.is_sine_first else (first, second)
        assert bool((cos == 1).all()) and bool((sin == 0).all())
        assert bool((call.unrotated().kwargs["other"] == 0).all()), "positions"
    assert pair(angles.sin(), angles.cos()).is_sine_first
    assert not pair(angles.cos(), angles.sin()).is_sine_first


def test_a_call_without_tables_has_none() -> None:
    call = LayerCall((torch.zeros(1, 4, 8),), {"mask": None})
    assert call.tables == "" and not call.is_sine_first
    assert call.unrotated().kwargs == {"mask": None}


def test_a_run_notes_linears_norms_composites_and_the_one_call_of_attention(team: Team) -> None:
    layer, call = layer_call(zoo_model("llama"), LLAMA, team)
    run = run_layer(layer, call)
    names = [noted.name for noted in run.noted]
    assert names.index("self_attn.o_proj") < names.index("self_attn") < names.index("mlp.down_proj")
    assert {noted.name for noted in run.noted if not noted.is_leaf} == {"self_attn", "mlp"}
    mlp, attention = run.noted[names.index("mlp")], run.noted[names.index("self_attn")]
    assert mlp.is_alone and not attention.is_alone, "attention is given tables too"
    assert [noted.module for noted in run.attention] == ["self_attn"]
    assert run.attention[0].query.shape == (TOKENS, 4, 16)
    assert run.x.shape == run.out.shape == (TOKENS, 64) and not run.is_tuple


def test_a_run_leaves_no_hook_and_no_attention_behind(team: Team) -> None:
    parts = ready(zoo_model("llama"), team)
    layer, call = layer_call(parts.model, LLAMA, team)
    run_layer(layer, call)
    assert not any(module._forward_hooks for module in layer.modules())
    context = vars(layer.self_attn)["_shoal_attention"]
    assert isinstance(context, AttentionContext)
    assert len(context.shapes) == 2, "the model's own run is all that was measured"


def test_rows_are_found_in_whatever_shape_a_token_has() -> None:
    x = torch.randn(TOKENS, 8)
    heads = x.view(TOKENS, 2, 4)
    for shape in (x, x[None], heads, heads[None], heads.transpose(0, 1)[None], x.view(1, 1, TOKENS, 8)):
        assert torch.equal(rows_of(shape, TOKENS), x)
    assert rows_of(x.double(), TOKENS).dtype is torch.float32
    with pytest.raises(ValueError, match="no row a token"):
        rows_of(x, TOKENS + 1)
