"""A rank's part of a model that lies on disk: built empty, cut by the plan, and only its slices read. Knows
no process.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from shoal.checkpoint.load import load_weights
from shoal.checkpoint.reader import CheckpointReader
from shoal.comm.base import Comm
from shoal.device.base import Device
from shoal.model.build import build_empty
from shoal.parallel.entry import Calls, adopt, hook_keys
from shoal.plan.slices import slices, zero_names
from shoal.plan.types import Plan
from shoal.shard import shard

__all__ = ["Recipe", "build_part"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What every rank builds its part from."""

    path: str
    model_class: type[PreTrainedModel]
    config: Any
    dtype: torch.dtype
    attention: str | None  # None: as the class prefers


def build_part(recipe: Recipe, plan: Plan, comm: Comm, device: Device, calls: Calls) -> PreTrainedModel:
    """This rank's part, on its device; whole if the plan is for one rank.

    Raises:
        CheckpointError: the files are damaged, or do not fit the model.
    """
    model = build_empty(recipe.model_class, recipe.config, recipe.dtype, recipe.attention)
    parts, zeros = slices(plan, model, comm.rank), zero_names(plan, model, comm.rank)
    if plan.tp > 1:
        hooks = hook_keys(model)
        shard(model, plan, comm.rank, comm)
        adopt(model, plan, calls, hooks)
    with CheckpointReader(Path(recipe.path)) as reader:
        load_weights(model, reader, parts, device.torch_device, recipe.dtype, zeros=zeros)
    if (Path(recipe.path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(recipe.path)
    return model
