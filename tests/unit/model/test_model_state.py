"""Models that keep a state, or nothing, are found out by looking, and what that costs is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shoal.attention.sdpa import paged_sdpa
from shoal.errors import UnsupportedError
from shoal.model.base import KeepsState, Ragged
from shoal.model.choose import Chosen, serve_causal
from shoal.model.selfcheck import make_check
from shoal.model.trial import Trials
from support.zoo.build import build
from support.zoo.catalogue import family_of

CPU = torch.device("cpu")
CHUNKS = "chunks are computed token by token"
# Layers with keys and values beside the state, and what is said of it.
STATES: dict[str, tuple[int, tuple[str, ...]]] = {
    "mamba": (0, (CHUNKS,)),
    "mamba2": (0, ()),
    "rwkv": (0, ("sequences decode alone",)),  # its code mixes rows up where each brings one token
    "xlstm": (0, ()),
    "recurrent_gemma": (1, (CHUNKS,)),  # its state hangs on modules
    "minimax": (1, ()),
    "qwen3_next": (1, ()),
    "zamba2": (2, ()),  # both in one layer
    "lfm2": (1, ()),
    "yuan": (2, ()),  # a filter's last tokens beside every layer's keys and values
}
NOTHING = {
    "openai": "about equal length",
    "xlnet": "of equal length",
    "reformer": "of equal length",
    "flaubert": "of equal length",
}


@torch.inference_mode()
def serve(name: str) -> Chosen:
    return serve_causal(build(family_of(name), "eager", torch.float32), paged_sdpa, CPU)


@pytest.mark.parametrize("name", [name for name in STATES if family_of(name).is_known])
def test_a_state_is_found_and_what_it_costs_is_said(name: str) -> None:
    num_kv_layers, costs = STATES[name]
    chosen = serve(name)
    assert chosen.model.way == "state" and isinstance(chosen.model, KeepsState)
    assert chosen.model.state_bytes > 0 and len(chosen.model.kv_shapes) == num_kv_layers
    said = "; ".join(chosen.notes)
    assert f"a state of {chosen.model.state_bytes} bytes" in said
    assert all(cost in said for cost in costs)
    assert (CHUNKS in said) == (CHUNKS in costs) and ("decode" in said) == any("decode" in c for c in costs)


@pytest.mark.parametrize("name", [name for name in NOTHING if family_of(name).is_known])
def test_where_nothing_can_be_kept_sequences_are_computed_anew(name: str) -> None:
    chosen = serve(name)
    assert chosen.model.way == "recompute" and not chosen.model.keeps_kv and not chosen.model.kv_shapes
    assert f"sequences {NOTHING[name]}" in "; ".join(chosen.notes).replace("of about", "about")


@torch.inference_mode()
def test_a_model_that_prepares_its_inputs_otherwise_is_held_to_what_generate_computes() -> None:
    """One pass over a prompt, without the mask token that it appends, would be another computation."""
    model = build(family_of("xlm"), "eager", torch.float32)
    check = make_check(model, CPU, Trials())
    assert check.oddity is not None
    prompt = list(check.prompts[1])
    arguments = model.prepare_inputs_for_generation(torch.tensor([prompt]))
    assert torch.allclose(check.expected[1][-1], model(**arguments).logits[0, -1], atol=1e-5)


@torch.inference_mode()
def test_two_states_do_not_meet() -> None:
    """A state that another sequence overwrote gives other logits: slots are what keeps them apart."""
    model = build(family_of("mamba2"), "eager", torch.float32)
    check = make_check(model, CPU, Trials())
    served = serve_causal(model, paged_sdpa, CPU).model
    assert check.problem(served) is None
    logits = served.logits

    def in_one_slot(batch: Ragged) -> torch.Tensor:
        batch.rows = [replace(row, slot=0) for row in batch.rows]
        return logits(batch)

    served.logits = in_one_slot  # type: ignore[method-assign]
    assert check.problem(served) is not None


@torch.inference_mode()
def test_a_way_can_be_asked_for_and_must_prove_like_any_other() -> None:
    model = build(family_of("llama"), "eager", torch.float32)
    for way in ("paged", "padded", "recompute"):
        assert serve_causal(model, paged_sdpa, CPU, way=way).model.way == way
    with pytest.raises(UnsupportedError, match="cannot be served: not state: TypeError: it keeps no state"):
        serve_causal(model, paged_sdpa, CPU, way="state")
    xlnet = build(family_of("xlnet"), "eager", torch.float32)
    with pytest.raises(UnsupportedError, match="neither paged, padded, state"):
        serve_causal(xlnet, paged_sdpa, CPU, way="padded")
