"""Which of the measured regions are split: those that may be, that the user's policy does not want
otherwise, and whose code becomes rank-local. Knows no proof.

Where a policy asks for what was not measured, the regions in question are given up, and the policy's
words are taken as they stand; a proof has then to show that they are right.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.plan.cones import Flow
from shoal.plan.fallback import Inventory
from shoal.plan.glue import Glue, Local
from shoal.plan.localise import MAX_CHECKS, localise
from shoal.plan.regions import DraftRegion, deal_region, draft_regions, rank_elements
from shoal.plan.survey import measure_first
from shoal.plan.wishes import Wish

__all__ = ["Findings", "accept_regions"]

_DONE = {
    "gather": "the policy gathers {}",
    "vocab": "the policy splits {} by rows",
    "replicate": "the policy keeps {} whole",
    "experts": "the policy deals whole experts of {}",
}
_MOST_HEADS = 256  # more components than that are neurons: dealt as they come
_MOST_UNITS = 4  # ways to deal heads that are tried


@dataclass(slots=True)
class Findings:
    """What holds for every rank count, and what was accepted for this one."""

    local: Local = field(default_factory=Local)
    reasons: dict[str, str] = field(default_factory=dict)  # weight pattern -> why it is in no region
    flow: Flow = field(default_factory=Flow)
    literal: dict[str, int] = field(default_factory=dict)  # patterns cut as the policy says -> found in round


def accept_regions(
    glue: Glue | None,
    failure: str,
    inventory: Inventory,
    tp: int,
    excluded: frozenset[str],
    wishes: Mapping[str, Wish],
) -> Findings:
    """Regions that pass the glue check, one added to the other, and why the others do not.

    Args:
        glue: the probe model and its recordings; None where there are none.
        failure: why there are none.
        inventory: of the whole model.
        tp: number of ranks.
        excluded: consumers whose proof failed.
        wishes: weight pattern -> what the user's policy asks for it.
    """
    flow, reason = _measured(glue, failure)
    literal: dict[str, int] = {}
    for number in itertools.count():
        found = Findings(flow=flow, literal=literal)
        if reason or glue is None:
            found.reasons = dict.fromkeys((*inventory.modules, *inventory.raw), reason)
        else:
            _accept(glue, found, inventory, tp, excluded, wishes)
        unconfirmed = _unconfirmed(found.local, wishes) - literal.keys()
        if not unconfirmed:
            break
        # Its regions are given up, which may leave further wishes without one.
        literal |= dict.fromkeys(sorted(unconfirmed), number)
    return found


def _measured(glue: Glue | None, failure: str) -> tuple[Flow, str]:
    """The data flow, or why it is not known."""
    if glue is None:
        return Flow(), f"not probed: {failure}"
    unchanged = glue.check(Local(), 0)
    if unchanged.error:
        return Flow(), f"not repeatable: {unchanged.error}"
    try:
        return measure_first(glue.model, glue.recordings), ""
    except Exception as error:  # backward code of the model's own may refuse in any way
        return Flow(), f"its gradients cannot be measured: {type(error).__name__}: {str(error)[:200]}"


def _accept(
    glue: Glue,
    found: Findings,
    inventory: Inventory,
    tp: int,
    excluded: frozenset[str],
    wishes: Mapping[str, Wish],
) -> None:
    """Add region after region to what is accepted, the heaviest components first."""
    loads = [0.0] * tp
    for region in draft_regions(found.flow, tp, inventory.elements):
        _refuse(region, inventory, excluded, glue)
        taken = sorted(
            {name for other in found.local.regions for name in other.widths} & region.widths.keys()
        )
        if taken and not region.reason:  # a weight is split by its outputs or by its inputs, not by both
            region.reason = f"{taken[0]} is split with other weights already"
        accepted, checks = None, glue.num_checks
        for unit in () if region.reason else _units(region, tp):
            region.unit, region.reason = unit, ""
            deal_region(region, loads)
            region.reason = region.reason or _otherwise_wished(region, wishes, found.literal)
            accepted = None if region.reason else localise(glue, found.local, region, tp)
            if accepted is not None or glue.num_checks > checks + MAX_CHECKS:
                break
        if accepted is not None:
            found.local = accepted
            loads = [
                load + rank_elements(region, inventory.elements, rank) for rank, load in enumerate(loads)
            ]
        else:
            found.reasons |= dict.fromkeys(region.widths, _explained(region, found.flow))
    for name, operation in found.flow.decided.items():
        found.reasons.setdefault(name, f"torch.{operation} decides by its outputs, so they are needed whole")


def _explained(region: DraftRegion, flow: Flow) -> str:
    """Why a region was not accepted, with what decides by a weight that feeds it where something does."""
    for name in sorted({name for consumer in region.consumers for name in consumer.whole}):
        if name in flow.decided:
            return f"{region.reason}; torch.{flow.decided[name]} decides by {name}"
    return region.reason


def _units(region: DraftRegion, tp: int) -> list[int]:
    """In how many components at a time to try to deal: code may hold its heads in groups of its own."""
    count = region.num_components
    if count > _MOST_HEADS:
        return [1]
    return [unit for unit in range(1, count // tp + 1) if count % unit == 0][:_MOST_UNITS]


def _refuse(region: DraftRegion, inventory: Inventory, excluded: frozenset[str], glue: Glue) -> None:
    """Set the reason of a region that may not be split whatever the glue check says."""
    if region.reason:
        return
    mixed_shapes = [name for name in region.widths if len(inventory.shapes.get(name, ())) != 1]
    tied = [name for name in region.widths if len(inventory.tied_to(name)) > 1]
    shortened = [name for name in region.widths if not _has_real_shape(name, inventory, glue)]
    if excluded & {consumer.call.pattern for consumer in region.consumers}:
        region.reason = "its proof failed"
    elif mixed_shapes:
        region.reason = f"layers differ in the shape of {mixed_shapes[0]}"
    elif shortened:
        region.reason = f"{shortened[0]} has as many features as there are layers, and some were left out"
    elif tied:
        region.reason = f"{tied[0]} is tied to another weight"
    else:
        region.reason = _used_otherwise(region, inventory, glue)


def _has_real_shape(pattern: str, inventory: Inventory, glue: Glue) -> bool:
    """Whether the short model's weights of a pattern are as large as the whole model's."""
    own = {
        tuple(parameter.shape)
        for name, parameter in glue.model.named_parameters(remove_duplicate=False)
        if glue.naming.key_of(name) == pattern
    }
    return own <= inventory.shapes.get(pattern, set())


def _used_otherwise(region: DraftRegion, inventory: Inventory, glue: Glue) -> str:
    """How some recording uses a weight in a way that a part of it would not do for; empty if none does."""
    for recording in glue.recordings:
        for call in recording.calls:
            if call.kind == "raw" and call.pattern in region.widths:
                how = call.function or "one with other weights"
                return f"{call.pattern} is used in {how}, which is no plain product"
    for consumer in region.consumers:
        if consumer.call.kind == "product" and consumer.call.pattern in inventory.modules:
            return (
                f"code other than its own module multiplies by {consumer.call.pattern}: nobody would add up"
            )
    return ""


def _otherwise_wished(region: DraftRegion, wishes: Mapping[str, Wish], literal: Mapping[str, int]) -> str:
    """Why the policy forbids the region; empty if it does not."""
    for name in region.widths:
        wish = wishes.get(name)
        if wish is None:
            continue
        if name in literal:
            return f"the policy's {wish.op} for {name} is not what was measured"
        rows = region.rows.get(name, ())
        is_whole = bool(rows) and all(len(part) == region.widths[name] for part in rows)
        if wish.op in _DONE and not (wish.op == "replicate" and is_whole):
            return _DONE[wish.op].format(name.removesuffix(".weight"))
    return ""


def _unconfirmed(local: Local, wishes: Mapping[str, Wish]) -> set[str]:
    """Patterns asked to be column or row that are not the one or the other in any accepted region."""
    producers = {name for region in local.regions for name in region.rows} | {
        raw.pattern for raw in local.raw
    }
    consumers = {name for region in local.regions for name in region.columns}
    for region in local.regions:  # what every rank needs all of: one KV head, for one
        producers |= {name for consumer in region.consumers for name in consumer.whole}
    held: dict[str, set[str]] = {"column": producers, "row": consumers}
    return {name for name, wish in wishes.items() if wish.op in held and name not in held[wish.op]}
