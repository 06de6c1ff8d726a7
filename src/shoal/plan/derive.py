"""Derives a plan from a model class and its config, by measuring. Knows no weights and no devices.

Build short and without weights, record, measure cones, form regions, make the code between rank-local
and check it; what does not pass is split the safe way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shoal.errors import PlanError
from shoal.plan.accept import Findings, accept_regions
from shoal.plan.asked import asked_reductions, asked_splits
from shoal.plan.fallback import Inventory, parameter_splits, take_inventory
from shoal.plan.footprint import count_collectives
from shoal.plan.glue import Glue, Local, Verdict
from shoal.plan.integers import integer_slots
from shoal.plan.kv import key_value_heads
from shoal.plan.naming import Naming, naming_of
from shoal.plan.policy import Policy
from shoal.plan.probe import Call, Recording
from shoal.plan.reductions import LateSums, find_reductions
from shoal.plan.regions import DraftRegion, component_counts
from shoal.plan.skeleton import Cut, build_on_meta, build_probe, cut_depth, shorten_lengths
from shoal.plan.survey import survey
from shoal.plan.types import KeyValueHeads, Patch, Plan, Reduction, Region, Split, pattern_of
from shoal.plan.wishes import Wish, wishes_of

__all__ = ["derive"]

_log = logging.getLogger("shoal.plan")


@dataclass(slots=True)
class _Probe:
    """The short model and what was recorded of it, or the reason why nothing was."""

    cut: Cut
    glue: Glue | None = None
    failure: str = ""
    long_tokens: int = 0  # at which it runs other code; 0: at none
    has_short_lengths: bool = True  # of blocks, windows and the like

    @property
    def recordings(self) -> Sequence[Recording]:
        return self.glue.recordings if self.glue else ()

    @property
    def naming(self) -> Naming:
        return self.glue.naming if self.glue else Naming()

    @property
    def calls(self) -> list[Call]:
        return [call for recording in self.recordings for call in recording.calls]


def derive(
    model_class: type[nn.Module],
    config: Any,
    tp: int,
    excluded: frozenset[str] = frozenset(),
    whole: frozenset[str] = frozenset(),
    policy: Policy | None = None,
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
        policy: what the user asks for. What it is silent about is derived; where it asks for column or
            row of a weight and measuring agrees, the derived ranges are taken; whatever else it asks for
            is done as it says, which is right only if it proves.

    Returns:
        a plan that passed the glue check at the model's real widths. It is not proved yet: see
        :mod:`shoal.prove`.

    Raises:
        PlanError: ``tp`` is below 1, the model cannot even be built on meta, or it has too little of
            something for the policy.
        UsageError: the policy names what the model does not have.
    """
    if tp < 1:
        raise PlanError(f"tensor_parallel_size: {tp} ranks; there must be at least 1")
    try:
        full = build_on_meta(model_class, config)
    except Exception as error:  # a model class may fail in any way; the caller needs one kind of error
        raise PlanError(f"{model_class.__name__} cannot be built: {type(error).__name__}: {error}") from error
    wishes = wishes_of(policy, full) if policy else {}
    probe = _probe(model_class, config, full, wishes)
    inventory = take_inventory(full, probe.naming)
    findings = Findings()
    if tp > 1:
        findings = accept_regions(
            probe.glue, probe.failure, inventory, tp, frozenset(map(probe.naming.key_of, excluded)), wishes
        )
    plan = _assemble(full, probe, inventory, findings, tp, whole, wishes)
    return _with_counts(plan, full, probe.recordings)


def _probe(model_class: type[nn.Module], config: Any, full: nn.Module, wishes: Mapping[str, Wish]) -> _Probe:
    """Record the short model, with short blocks and windows if it can be run so."""
    cut = cut_depth(model_class, config, full)
    failure = ""
    for has_short_lengths, own in ((True, shorten_lengths(model_class, cut.config)), (False, cut.config)):
        try:
            model = build_probe(model_class, own)
            slots = frozenset(integer_slots(model))
            found = survey(model, own)
        except Exception as error:  # a model's own code; what cannot be followed is split the safe way
            failure = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        naming = naming_of(full, cut.kinds, wishes)
        naming.apply(found.recordings)
        glue = Glue(model, found.recordings, slots, naming=naming)
        return _Probe(cut, glue, long_tokens=found.long_tokens, has_short_lengths=has_short_lengths)
    _log.warning("%s cannot be probed, all is gathered: %s", model_class.__name__, failure)
    return _Probe(cut, None, failure)


def _assemble(
    full: nn.Module,
    probe: _Probe,
    inventory: Inventory,
    findings: Findings,
    tp: int,
    whole: frozenset[str],
    wishes: Mapping[str, Wish],
) -> Plan:
    local = findings.local
    splits = {}
    if tp > 1:
        splits = parameter_splits(inventory, local.regions, local.raw, probe.calls, findings.reasons, tp)
        splits = asked_splits(wishes, findings.literal, inventory, full, splits, tp)
        keys = {probe.naming.key_of(name) for name in whole}
        splits |= {name: Split("replicate", reason="its proof failed") for name in keys}
        splits = probe.naming.spelled(splits)
    late = _late_sums(probe, splits, asked_reductions(wishes) if tp > 1 else ())
    splits |= late.splits()
    kv, about_kv = _key_values(probe, _with_literal(local, splits, findings.literal), tp)
    return Plan(
        tp=tp,
        model_class=type(full).__name__,
        params=splits,
        patches=tuple(
            Patch(key.module, key.class_name, key.attribute, key.old, values)
            for key, values in local.patches.items()
        ),
        args=tuple(local.args),
        reshapes=tuple(local.reshapes),
        reductions=late.reductions,
        kv=kv,
        regions=tuple(entry for region in local.regions for entry in _regions(region, probe.naming)),
        evidence={
            "glue_checks": probe.glue.num_checks if probe.glue else 0,
            "gradient_products": findings.flow.num_products,
            "long_tokens": probe.long_tokens,
            "short_lengths": probe.has_short_lengths,
            "draws": " ".join(sorted({name for recording in probe.recordings for name in recording.draws})),
            "kv_cache": about_kv,
        },
    )


def _late_sums(probe: _Probe, splits: Mapping[str, Split], asked: tuple[Reduction, ...]) -> LateSums:
    """Where results are summed over ranks once for a whole block."""
    settled = {name for entry in asked for name in entry.weights}
    rows = {name for name, split in splits.items() if split.op == "row"} - settled
    if probe.glue is None or not (rows or asked):
        return LateSums(asked)
    held = {name for name, split in splits.items() if split.is_split}
    return find_reductions(probe.glue, rows, held, asked)


def _regions(region: DraftRegion, naming: Naming) -> Iterator[Region]:
    """One for every consumer, in every layer of its kind where it is told apart from others; those of one
    draft share producers.
    """
    for consumer in region.consumers:
        own = consumer.cones.keys() & region.rows.keys()
        for name in naming.names_of(consumer.call.pattern) or [consumer.call.pattern]:
            yield Region(
                name,
                tuple(naming.beside(name, key) for key in sorted(own)),
                region.num_components,
                region.shares,
                consumer.width,
                component_counts(consumer),
                tuple(naming.beside(name, key) for key in region.duplicated if key in own),
            )


def _with_literal(local: Local, splits: Mapping[str, Split], literal: Mapping[str, int]) -> Local:
    """What is local with the weights that are split as the policy says, for their part in the cache."""
    if not literal:
        return local
    region = DraftRegion([])
    for name in literal.keys() & splits.keys():
        parts = [torch.cat([torch.arange(*pair) for pair in ranges]) for ranges in splits[name].ranges]
        (region.rows if splits[name].op == "column" else region.columns)[name] = parts
    return local.plus(region)


def _key_values(probe: _Probe, local: Local, tp: int) -> tuple[tuple[KeyValueHeads, ...], str]:
    """KV heads as each rank's code left them in a cache, or nothing; and what is known of the cache."""
    if probe.glue is None:
        return (), f"unknown: not probed: {probe.failure}"
    whole = probe.recordings[0].passes[0]
    if whole.cache is None:
        return (), "none: the model keeps no cache"
    first = replace(probe.glue, recordings=probe.glue.recordings[:1])
    found: dict[tuple[int, ...], Verdict] = {}
    for rank in range(tp):
        sizes = local.sizes(rank)
        if sizes not in found:
            found[sizes] = first.check(local, rank, traced=False)
            if found[sizes].error:
                return (), f"unknown: {found[sizes].error}"
    passes = [found[local.sizes(rank)].passes[0][0] for rank in range(tp)]
    heads = key_value_heads(whole, passes, probe.cut)
    return heads, "measured" if heads else "unknown: the cache does not hold keys and values of heads"


def _with_counts(plan: Plan, full: nn.Module, recordings: Sequence[Recording]) -> Plan:
    """The plan with its collectives counted, a weight's as often as the model used it."""
    uses: dict[str, int] = {}
    for call in recordings[-1].calls if recordings else ():
        if call.step == 0:
            pattern = pattern_of(call.weight)
            uses[pattern] = max(uses.get(pattern, 0), call.index + 1)
    counts = count_collectives(plan, full, uses)
    evidence = {**plan.evidence, "all_reduces": counts.all_reduces, "all_gathers": counts.all_gathers}
    return replace(plan, evidence=evidence)
