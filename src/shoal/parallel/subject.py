"""The model that is to be parallelized, in memory or on disk, and its plan. Starts nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from shoal.checkpoint.source import resolve
from shoal.home import home
from shoal.model.build import load_config
from shoal.model.classes import architecture_class
from shoal.model.structure import check_structure
from shoal.parallel.build import Recipe
from shoal.parallel.request import check_model
from shoal.plan.types import Plan
from shoal.prove import plan_and_prove

__all__ = ["Subject", "make_plan", "read_subject"]


@dataclass(frozen=True, slots=True)
class Subject:
    """One of the two is there."""

    model: PreTrainedModel | None
    recipe: Recipe | None

    @property
    def model_class(self) -> type[PreTrainedModel]:
        """The model's class."""
        if self.recipe is not None:
            return self.recipe.model_class
        assert self.model is not None
        return type(self.model)

    @property
    def config(self) -> Any:
        """The model's config."""
        if self.recipe is not None:
            return self.recipe.config
        assert self.model is not None
        return self.model.config


def read_subject(
    model: Any,
    dtype: torch.dtype | None,
    attn_implementation: str | None,
    trust_remote_code: bool,
    revision: str | None,
) -> Subject:
    """Look at what is to be parallelized.

    Raises:
        UsageError: it cannot be; see :mod:`.request`, and :func:`shoal.checkpoint.source.resolve` for paths.
    """
    if isinstance(model, (str, Path)):
        path = resolve(model, revision)
        config = load_config(path, trust_remote_code)
        kind = architecture_class(config, path, trust_remote_code)
        return Subject(
            None, Recipe(str(path), kind, config, dtype or _own_dtype(config), attn_implementation)
        )
    checked = check_model(model)
    if attn_implementation is not None:
        checked.set_attn_implementation(attn_implementation)
    check_structure(checked)
    return Subject(checked, None)


def _own_dtype(config: Any) -> torch.dtype:
    """The checkpoint's dtype, as ``from_pretrained`` has it."""
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def make_plan(subject: Subject, tp: int, policy: Any) -> Plan:
    """A proved plan, from the cache folder where it was proved before.

    Raises:
        PlanError: none can be proved, or the policy asks for what is wrong.
        UsageError: the policy cannot be understood.
    """
    return plan_and_prove(subject.model_class, subject.config, tp, home() / "plans", policy)
