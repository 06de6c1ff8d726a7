"""``shoal.plan`` and ``shoal.prove``: a plan for a model in memory, on disk or on the hub, and its proof.
Loads no weights and starts no rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import nn

from shoal.checkpoint.source import resolve_config
from shoal.errors import UsageError
from shoal.home import home
from shoal.model.build import load_config
from shoal.model.classes import architecture_class
from shoal.model.structure import check_structure
from shoal.plan.policy import Policy
from shoal.plan.quantised import refuse_quantised
from shoal.plan.types import Plan, Scalar
from shoal.prove.prove import plan_and_prove
from shoal.prove.prove import prove as prove_plan

__all__ = ["ModelPlan", "PlanSubject", "plan", "prove", "read_subject"]


@dataclass(frozen=True, slots=True)
class PlanSubject:
    """What is planned: a class, and the config it is built from."""

    model_class: type[nn.Module]
    config: Any


@dataclass(frozen=True, slots=True)
class ModelPlan(Plan):
    """A plan that knows what it is for."""

    subject: PlanSubject | None = field(default=None, compare=False, repr=False)

    def prove(self) -> dict[str, Scalar]:
        """Run the proof once more, with the layers that ranks run.

        Returns:
            evidence: whether it is ``proved``, the largest ``relative_error``, the ``tolerance`` ...

        Raises:
            PlanError: the plan is not right.
        """
        if self.subject is None:
            raise UsageError("plan: it does not know its model; make it with shoal.plan", field="plan")
        return prove_plan(self, self.subject.model_class, self.subject.config)


def plan(
    model: nn.Module | str | Path,
    tp: int,
    policy: Policy | Mapping[Any, Any] | str | Path | None = None,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> ModelPlan:
    """How a model is split over ``tp`` ranks, derived and proved (or read back, where it was before).

    Args:
        model: a transformers model in memory (on any device, on meta too), a folder (its ``config.json``
            is enough), a hub id (of which only small files are fetched), a ``.gguf`` file or ``"demo"``.
        tp: number of ranks.
        policy: how to split, where the measured way is not wanted: DeepSpeed's ``injection_policy``, a
            transformers ``tp_plan``, our own words (:mod:`shoal.plan.policy`), or a file of these.
        trust_remote_code: whether code that comes with a checkpoint may be run.
        revision: branch, tag or commit of a hub model.

    Raises:
        UsageError: no such model, one that is not supported, or a policy that cannot be understood.
        PlanError: no plan proves, or the policy asks for what is wrong.
    """
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise UsageError(f"tp: {tp!r} is not a number of ranks; pass at least 1", field="tp")
    subject = read_subject(model, trust_remote_code, revision)
    made = plan_and_prove(subject.model_class, subject.config, tp, home() / "plans", policy)
    return ModelPlan(**{entry.name: getattr(made, entry.name) for entry in fields(Plan)}, subject=subject)


def prove(plan: Plan, model: nn.Module | str | Path | None = None, **options: Any) -> dict[str, Scalar]:
    """Prove a plan with the layers that ranks run.

    Args:
        plan: from :func:`plan`; or any, and then ``model`` says for what.
        model: as :func:`plan` takes it.
        options: as :func:`plan` takes them.

    Returns:
        the evidence.

    Raises:
        PlanError: the plan is not right.
        UsageError: it is not known what the plan is for.
    """
    if not isinstance(plan, Plan):
        raise UsageError(f"plan: a {type(plan).__name__} is no plan; make one with shoal.plan", field="plan")
    if model is not None:
        subject = read_subject(model, **options)
        return prove_plan(plan, subject.model_class, subject.config)
    if not isinstance(plan, ModelPlan):
        raise UsageError("plan: it does not know its model; pass the model too", field="plan")
    return plan.prove()


def read_subject(
    model: nn.Module | str | Path, trust_remote_code: bool = False, revision: str | None = None
) -> PlanSubject:
    """The class and config of a model in memory or of a checkpoint.

    Raises:
        ModelNotFoundError: no such model.
        UnsupportedError: it is quantised, takes more than text, was changed since its class made it, or
            there is no class for it.
        UsageError: it is neither a model nor the name of one.
    """
    if isinstance(model, (str, Path)):
        path = resolve_config(model, revision)
        config = load_config(path, trust_remote_code)
        return PlanSubject(architecture_class(config, path, trust_remote_code), config)
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        inner = getattr(model, "model", None)
        hint = "; pass its .model" if isinstance(inner, nn.Module) else ""
        raise UsageError(
            f"model: a {type(model).__name__} is neither a transformers model nor a path or hub id{hint}",
            field="model",
        )
    refuse_quantised(model)
    check_structure(model)
    return PlanSubject(type(model), model.config)
