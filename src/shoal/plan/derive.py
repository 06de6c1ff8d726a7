"""Derives a plan from a model class and its config, by measuring. Knows no weights and no devices.

Build short and without weights, record, measure cones, form regions, make the code between rank-local
and check it; what does not pass is split the safe way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from shoal.errors import PlanError
from shoal.plan.cones import Flow, measure
from shoal.plan.drive import batch_of
from shoal.plan.fallback import Inventory, parameter_splits, take_inventory
from shoal.plan.glue import Glue, Local
from shoal.plan.kv import key_value_heads
from shoal.plan.localise import localise
from shoal.plan.probe import Call, Recording, record
from shoal.plan.regions import DraftRegion, deal_region, draft_regions, rank_elements
from shoal.plan.skeleton import Cut, build_on_meta, build_probe, cut_depth, embedding_size
from shoal.plan.types import KeyValueHeads, Patch, Plan, Region, Split

__all__ = ["derive"]

_TOKENS = 8  # per row of a probe batch
_log = logging.getLogger("shoal.plan")


@dataclass(slots=True)
class _Probe:
    """The short model and what was recorded of it, or the reason why nothing was."""

    cut: Cut
    glue: Glue | None = None
    failure: str = ""

    @property
    def recordings(self) -> Sequence[Recording]:
        return self.glue.recordings if self.glue else ()

    @property
    def calls(self) -> list[Call]:
        return [call for recording in self.recordings for call in recording.calls]


@dataclass(slots=True)
class _Findings:
    """What holds for every rank count, and what was accepted for this one."""

    local: Local = field(default_factory=Local)
    reasons: dict[str, str] = field(default_factory=dict)  # weight pattern -> why it is in no region
    flow: Flow = field(default_factory=Flow)


def derive(
    model_class: type[nn.Module],
    config: Any,
    tp: int,
    excluded: frozenset[str] = frozenset(),
    whole: frozenset[str] = frozenset(),
) -> Plan:
    """Measure how the model can be split over ``tp`` ranks.

    Neither the config nor any global state is changed; no weights are needed, and nothing of the
    model's size is allocated.

    Args:
        model_class: a transformers model class.
        config: its config.
        tp: number of ranks, at least 1.
        excluded: consumers (parameter patterns) whose regions are to be gathered instead, because a
            proof of them failed.
        whole: parameter patterns to replicate, because a proof with them gathered failed.

    Returns:
        a plan that passed the glue check at the model's real widths. It is not proved yet: see
        :mod:`shoal.prove`.

    Raises:
        PlanError: ``tp`` is below 1, or the model cannot even be built on meta.
    """
    if tp < 1:
        raise PlanError(f"tensor_parallel_size: {tp} ranks; there must be at least 1")
    try:
        full = build_on_meta(model_class, config)
    except Exception as error:  # a model class may fail in any way; the caller needs one kind of error
        raise PlanError(f"{model_class.__name__} cannot be built: {type(error).__name__}: {error}") from error
    probe = _probe(model_class, config, full)
    inventory = take_inventory(full)
    findings = _findings(probe, inventory, tp, excluded) if tp > 1 else _Findings()
    return _assemble(model_class, probe, inventory, findings, tp, whole)


def _probe(model_class: type[nn.Module], config: Any, full: nn.Module) -> _Probe:
    cut = cut_depth(model_class, config, full)
    try:
        model = build_probe(model_class, cut.config)
        vocabulary = embedding_size(config)
        recordings = [
            record(model, batch_of(vocabulary, batch, _TOKENS), watch_arguments=batch == 1)
            for batch in (1, 2)
        ]
    except Exception as error:  # a model's own code; what cannot be followed is split the safe way
        failure = f"{type(error).__name__}: {str(error)[:200]}"
        _log.warning("%s cannot be probed, all is gathered: %s", model_class.__name__, failure)
        return _Probe(cut, None, failure)
    return _Probe(cut, Glue(model, recordings))


def _findings(probe: _Probe, inventory: Inventory, tp: int, excluded: frozenset[str]) -> _Findings:
    """Regions that pass the glue check, one added to the other, and why the others do not."""
    found = _Findings()
    if probe.glue is None:
        found.reasons = dict.fromkeys(inventory.modules, f"not probed: {probe.failure}")
        return found
    unchanged = probe.glue.check(Local(), 0)
    if unchanged.error:
        found.reasons = dict.fromkeys(inventory.modules, f"not repeatable: {unchanged.error}")
        return found
    try:
        found.flow = measure(probe.recordings[0])
    except Exception as error:  # backward code of the model's own may refuse in any way
        reason = f"its gradients cannot be measured: {type(error).__name__}: {str(error)[:200]}"
        found.reasons = dict.fromkeys(inventory.modules, reason)
        return found
    loads = [0.0] * tp
    for region in draft_regions(found.flow, tp, inventory.elements):
        _refuse(region, inventory, excluded)
        if not region.reason:
            deal_region(region, loads)
        accepted = None if region.reason else localise(probe.glue, found.local, region, tp)
        if accepted is not None:
            found.local = accepted
            loads = [
                load + rank_elements(region, inventory.elements, rank) for rank, load in enumerate(loads)
            ]
        else:
            found.reasons |= dict.fromkeys(region.widths, region.reason)
    return found


def _refuse(region: DraftRegion, inventory: Inventory, excluded: frozenset[str]) -> None:
    """Set the reason of a region that may not be split whatever the glue check says."""
    if region.reason:
        return
    mixed_shapes = [name for name in region.widths if len(inventory.shapes.get(name, ())) != 1]
    tied = [name for name in region.widths if len(inventory.tied_to(name)) > 1]
    if excluded & {consumer.call.pattern for consumer in region.consumers}:
        region.reason = "its proof failed"
    elif mixed_shapes:
        region.reason = f"layers differ in the shape of {mixed_shapes[0]}"
    elif tied:
        region.reason = f"{tied[0]} is tied to another weight"


def _assemble(
    model_class: type[nn.Module],
    probe: _Probe,
    inventory: Inventory,
    findings: _Findings,
    tp: int,
    whole: frozenset[str],
) -> Plan:
    local = findings.local
    splits = {}
    if tp > 1:
        splits = parameter_splits(inventory, local.regions, local.raw, probe.calls, findings.reasons, tp)
        splits |= {name: Split("replicate", reason="its proof failed") for name in whole}
    checks = probe.glue.num_checks if probe.glue else 0
    return Plan(
        tp=tp,
        model_class=model_class.__name__,
        params=splits,
        patches=tuple(
            Patch(key.module, key.class_name, key.attribute, key.old, values)
            for key, values in local.patches.items()
        ),
        args=tuple(local.args),
        kv=_key_values(probe, local, tp),
        regions=tuple(
            Region(
                region.name,
                tuple(sorted(region.rows)),
                region.num_components,
                region.shares,
                region.consumers[0].width,
                region.divisions,
                region.duplicated,
            )
            for region in local.regions
        ),
        evidence={"glue_checks": checks, "gradient_products": findings.flow.num_products},
    )


def _key_values(probe: _Probe, local: Local, tp: int) -> tuple[KeyValueHeads, ...]:
    """KV heads as each rank's code left them in a cache; empty where there is no such cache."""
    if probe.glue is None:
        return ()
    first = replace(probe.glue, recordings=probe.glue.recordings[:1])
    ranks = [first.check(local, rank, traced=False) for rank in range(tp)]
    if any(verdict.error for verdict in ranks):
        return ()
    whole = probe.recordings[0].passes[0]
    return key_value_heads(whole, [verdict.passes[0][0] for verdict in ranks], probe.cut)
