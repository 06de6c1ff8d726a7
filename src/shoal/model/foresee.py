"""Which way a decoder will be served, seen on a small random model of its class before any weights are there.
Knows no checkpoint; what the loaded weights then show is what counts (:mod:`.choose`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from shoal.attention.sdpa import paged_sdpa
from shoal.errors import PlanError, UnsupportedError
from shoal.model.choose import serve_causal
from shoal.model.recompute import COST
from shoal.plan.skeleton import building
from shoal.plan.types import Plan
from shoal.prove.clone import find_clone

__all__ = ["Foreseen", "foresee"]


_COSTS = {
    "recompute": COST,
    "state": "a state for each sequence, beside or in place of keys and values; no prefix is reused",
}


class Foreseen(NamedTuple):
    """How a model will be served."""

    way: str  # "none": no way
    cost: str  # of that way; empty where it costs nothing
    reasons: tuple[str, ...]  # why it is not another one


@torch.inference_mode()
def foresee(plan: Plan, model_class: type[PreTrainedModel], config: Any) -> Foreseen | None:
    """The way of a small model of the class; None if the class makes no text of its own, or is not to be had
    small.

    Args:
        plan: of the full model.
        model_class: a transformers class.
        config: the full model's.
    """
    if config.is_encoder_decoder or not model_class.can_generate():
        return None
    try:
        small = find_clone(plan, model_class, config).config
    except PlanError:
        return None
    with building(), torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class._from_config(small, dtype=torch.float32, attn_implementation="eager").eval()
    try:
        chosen = serve_causal(model, paged_sdpa, torch.device("cpu"))
    except UnsupportedError as error:
        return Foreseen("none", "", (str(error),))
    way = chosen.model.way
    return Foreseen(
        way,
        _COSTS.get(way, ""),
        tuple(note for note in chosen.notes if note.startswith(("not ", "neither "))),
    )
