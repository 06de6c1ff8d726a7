"""Which way a model will be served, seen on a small random model of its class before any weights are there.
Knows no checkpoint; what the loaded weights then show is what counts (:mod:`.choose` and its like).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from shoal.attention.sdpa import paged_sdpa
from shoal.errors import PlanError, UnsupportedError
from shoal.model.choose import Chosen, serve_causal
from shoal.model.choose_encoder import ChosenEncoder, serve_encoder
from shoal.model.choose_seq2seq import serve_seq2seq
from shoal.model.recompute import COST
from shoal.plan.skeleton import building
from shoal.plan.types import Plan
from shoal.prove.clone import find_clone

__all__ = ["Foreseen", "foresee"]


_COSTS = {
    "recompute": COST,
    "state": "a state for each sequence, beside or in place of keys and values; no prefix is reused",
    "padded": "texts, or sequences that decode together, are padded to the longest",
    "alone": "one text is computed after the other",
}


class Foreseen(NamedTuple):
    """How a model will be served."""

    way: str  # "none": no way
    cost: str  # of that way; empty where it costs nothing
    reasons: tuple[str, ...]  # why it is not another one


@torch.inference_mode()
def foresee(plan: Plan, model_class: type[PreTrainedModel], config: Any) -> Foreseen | None:
    """The way of a small model of the class; None if the class is not to be had small, or is an encoder and a
    decoder without a head, which is not served.

    Args:
        plan: of the full model.
        model_class: a transformers class.
        config: the full model's.
    """
    if config.is_encoder_decoder and not model_class.can_generate():
        return None
    try:
        small = find_clone(plan, model_class, config).config
    except PlanError:
        return None
    with building(), torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class._from_config(small, dtype=torch.float32, attn_implementation="eager").eval()
    try:
        chosen = _chosen(model)
    except UnsupportedError as error:
        return Foreseen("none", "", (str(error),))
    way, said = chosen.model.way, chosen.notes[-1].partition(": ")[2]
    reasons = tuple(note for note in chosen.notes if note.startswith(("not ", "neither ")))
    return Foreseen(way, said or _COSTS.get(way, ""), reasons)


def _chosen(model: PreTrainedModel) -> Chosen | ChosenEncoder:
    """How the model is served, as the ranks would.

    Raises:
        UnsupportedError: it is not.
    """
    device = torch.device("cpu")
    if not model.can_generate():
        return serve_encoder(model, paged_sdpa, device)
    if model.config.is_encoder_decoder:
        return serve_seq2seq(model, device)
    return serve_causal(model, paged_sdpa, device)
