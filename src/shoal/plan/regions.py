"""Groups producers and consumers into regions that can be split without exchanging anything in between,
and deals their components to ranks. Knows no model code.

A component is a block of consumer features (a head, a KV group, a neuron). A rank takes consecutive
components; how many is chosen so that the *rank's* bytes come out even, region after region, coarse
ones first: what an uneven deal of heads leaves over, the neurons make up for.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

import torch

from shoal.plan.calls import Call
from shoal.plan.cones import Cone, Consumer, Flow
from shoal.plan.features import Features, Slab, find_slab
from shoal.plan.types import Range, even_ranges, pattern_of

__all__ = [
    "DraftRegion",
    "component_counts",
    "deal",
    "deal_region",
    "draft_regions",
    "home_of",
    "ranges_of",
    "rank_elements",
]

_QUANTA = (16, 8, 4, 2, 1)  # neurons are dealt by so many: a vector register, or a panel of a packed weight
_MIN_QUANTA = 32  # per rank, so that rounding to quanta does not unbalance the ranks


@dataclass(slots=True)
class DraftRegion:
    """Consumers that share producers, before anything is proven."""

    consumers: list[Consumer]
    num_components: int = 0
    component_elements: float = 0.0  # of one component, all layers together
    unit: int = 1  # components that are dealt together
    coarser: int = 0  # a coarser division with fewer components than ranks, if there is one
    shares: tuple[int, ...] = ()
    duplicated: tuple[str, ...] = ()  # producer patterns
    columns: dict[str, list[torch.Tensor]] = field(default_factory=dict)  # pattern -> indices a rank
    rows: dict[str, list[torch.Tensor]] = field(default_factory=dict)  # pattern -> indices a rank
    slabs: dict[str, Slab] = field(default_factory=dict)  # pattern -> what ranks keep of the parameter
    widths: dict[str, int] = field(default_factory=dict)  # pattern -> all features
    home: str = ""  # pattern of the module whose code lies between producers and consumers
    reason: str = ""  # why it cannot be split; empty if it may be

    @property
    def patterns(self) -> list[str]:
        return [*self.rows, *self.columns]

    @property
    def divisions(self) -> tuple[int, ...]:
        """Into how many blocks the producers' features divide the first consumer."""
        return component_counts(self.consumers[0])

    @property
    def name(self) -> str:
        return self.consumers[0].call.pattern

    @property
    def products(self) -> set[str]:
        """Patterns of the weights that code of its own multiplies by."""
        calls = [call for consumer in self.consumers for call in (*consumer.calls, *consumer.upstream)]
        return {call.pattern for call in calls if call.kind == "product"}


def draft_regions(flow: Flow, tp: int, elements: Mapping[str, int]) -> list[DraftRegion]:
    """Regions, the one with the heaviest components first; one that cannot be split carries the reason.

    Args:
        flow: what was measured.
        tp: number of ranks.
        elements: per weight pattern, elements in the whole model (all layers).
    """
    regions = [DraftRegion(group) for group in _joined(flow.consumers)]
    for region in regions:
        _describe(region, elements)
        if not region.reason:
            _choose_components(region, tp, elements)
    return sorted(regions, key=lambda region: -region.component_elements)


def deal_region(region: DraftRegion, loads: Sequence[float]) -> None:
    """Give every rank its components, so that ``loads`` (elements a rank) come out level, and cut.

    The region's ``reason`` is set where a rank's features are no part of the parameter along one dimension.
    """
    tp = len(loads)
    count, weight = region.num_components // region.unit, region.component_elements * region.unit
    shares = deal(count, tp, weight, loads, region.coarser)
    region.shares = tuple(share * region.unit for share in shares)
    region.rows, region.columns, region.slabs = {}, {}, {}
    _cut(region, tp)
    _find_slabs(region)


def rank_elements(region: DraftRegion, elements: Mapping[str, int], rank: int) -> float:
    """Elements of the region that a rank holds."""
    parts = {**region.rows, **region.columns}
    return sum(elements[name] * len(part[rank]) / region.widths[name] for name, part in parts.items())


def _joined(consumers: Sequence[Consumer]) -> list[list[Consumer]]:
    """Consumers that share a producer pattern, together."""
    groups: list[tuple[set[str], list[Consumer]]] = []
    for consumer in consumers:
        producers = set(consumer.cones)
        members = [consumer]
        for other in [group for group in groups if group[0] & producers]:
            groups.remove(other)
            producers |= other[0]
            members = other[1] + members
        groups.append((producers, members))
    return [members for _, members in groups]


def _describe(region: DraftRegion, elements: Mapping[str, int]) -> None:
    """Fill in widths and home; refuse what is no plain producers-to-consumers region."""
    for consumer in region.consumers:
        region.widths[consumer.call.pattern] = consumer.width
        region.widths |= {call.pattern: call.num_outputs for call in consumer.upstream}
    consumers = {consumer.call.pattern for consumer in region.consumers}
    producers = {call.pattern for consumer in region.consumers for call in consumer.upstream}
    unknown = (producers | consumers) - elements.keys()
    # Fed by other weights in other layers is one way of use.
    ways = {(c.call.pattern, c.width, c.call.kind, _dims(c.call.input_features)) for c in region.consumers}
    if len(consumers) < len(ways):
        region.reason = "a consumer is used in two ways"
    elif producers & consumers:
        region.reason = "a consumer is a producer of the same region"
    elif unknown:
        region.reason = f"no weight of the whole model is named {sorted(unknown)[0]}"
    region.home = home_of(region.consumers)


def _dims(features: Features | None) -> tuple[tuple[int, ...], ...]:
    return (features.dims, features.sizes, features.shape) if features else ()


def home_of(consumers: Sequence[Consumer]) -> str:
    """Pattern of the innermost module that contains consumers and producers of one layer."""
    names: list[list[str]] = []
    for consumer in consumers:
        layer = _layer_of(consumer.call)
        calls = [call for call in (*consumer.calls, *consumer.upstream) if _layer_of(call) == layer]
        for call in calls:
            names += _places_of(call)
    columns = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False))
    common = [parts[0] for parts in columns]
    if names.count(common):  # a single linear: its parent's code is what lies around it
        common = common[:-1]
    return pattern_of(".".join(common))


def _layer_of(call: Call) -> list[str]:
    """The numbers in a weight's name, an expert's left out."""
    return [part for part in call.weight.split(".")[:-1] if part.isdigit()][:1]


def _places_of(call: Call) -> list[list[str]]:
    """Paths within the home: a linear as it is one, or a parameter and the modules that take hold of it."""
    path = call.weight.split(".")
    if call.kind != "product":
        return [path[:-1]]
    return [path, *([*user.split("."), ""] if user else [""] for user in call.users)]


def _choose_components(region: DraftRegion, tp: int, elements: Mapping[str, int]) -> None:
    """The coarsest division that gives every rank a component."""
    counts = {component_counts(consumer) for consumer in region.consumers}
    if len(counts) > 1:
        region.reason = "its consumers have different numbers of components"
        return
    ascending = counts.pop()  # e.g. KV groups, then query heads
    fitting = [count for count in ascending if count >= tp]
    few = max((count for count in ascending if count < tp), default=1)
    if not fitting or _duplicated_share(region, fitting[0]) > 0.5:
        region.reason = f"{few} components are fewer than {tp} ranks"
        return
    region.num_components = fitting[0]
    region.coarser = max((count for count in ascending if count < tp), default=0)
    region.component_elements = sum(elements[name] for name in region.widths) / region.num_components


def _duplicated_share(region: DraftRegion, count: int) -> float:
    """Share of the producers' features that belong to more than one of ``count`` components."""
    shared, everything = 0, 0
    for consumer in region.consumers:
        for cone in consumer.cones.values():
            shared += int((cone.block_size > consumer.width // count).sum())
            everything += len(cone.block_size)
    return shared / max(1, everything)


def component_counts(consumer: Consumer) -> tuple[int, ...]:
    """Into how many components each kind of producer feature divides the consumer, a division at a time."""
    sizes = {size for cone in consumer.cones.values() for size in cone.sizes()}
    return tuple(sorted({consumer.width // size for size in sizes}))


def deal(count: int, tp: int, weight: float, loads: Sequence[float], coarser: int = 0) -> tuple[int, ...]:
    """How many of ``count`` equal components each rank takes, at least one.

    Args:
        count: number of components, at least ``tp``.
        tp: number of ranks.
        weight: elements of one component.
        loads: elements each rank has so far; the result levels them.
        coarser: a number of coarser components (KV heads), fewer than ranks, that the components belong
            to in equal parts. Each rank then stays within one of them, so that it needs one only.
    """
    if coarser and count % coarser == 0 and count // coarser >= -(-tp // coarser):
        shares: list[int] = []
        for ((start, stop),) in even_ranges(tp, coarser):
            shares += [b - a for ((a, b),) in even_ranges(count // coarser, stop - start)]
        return tuple(shares)
    quantum = gcd(count, next(size for size in _QUANTA if size * _MIN_QUANTA <= count // tp or size == 1))
    units = count // quantum
    target = (sum(loads) + count * weight) / tp
    wanted = [max(1.0, (target - load) / (weight * quantum)) for load in loads]
    scale = units / sum(wanted)
    shares = [max(1, int(want * scale + 1e-9)) for want in wanted]
    order = sorted(range(tp), key=lambda rank: (shares[rank] - wanted[rank] * scale, rank))
    for step in range(units - sum(shares)):
        shares[order[step % tp]] += 1
    while sum(shares) > units:  # the minimum of one took too much
        shares[shares.index(max(shares))] -= 1
    return tuple(share * quantum for share in shares)


def _cut(region: DraftRegion, tp: int) -> None:
    """Indices of every consumer and producer for each rank, from the shares."""
    duplicated: set[str] = set()
    bounds = [sum(region.shares[:rank]) for rank in range(tp + 1)]
    for consumer in region.consumers:
        size = consumer.width // region.num_components
        edges = [bound * size for bound in bounds]
        pairs = list(itertools.pairwise(edges))
        region.columns[consumer.call.pattern] = [torch.arange(start, stop) for start, stop in pairs]
        for name, cone in consumer.cones.items():
            _merge(region, name, [_rows(region, consumer, cone, start, stop) for start, stop in pairs])
    for name, parts in region.rows.items():
        if sum(len(part) for part in parts) > region.widths[name]:
            duplicated.add(name)
    region.duplicated = tuple(sorted(duplicated))


def _rows(region: DraftRegion, consumer: Consumer, cone: Cone, start: int, stop: int) -> torch.Tensor:
    """What reaches those features of a consumer; unknown features unless another consumer knows them."""
    rows = cone.rows(start, stop)
    others = [other.cones[cone.producer] for other in region.consumers if other is not consumer
              and cone.producer in other.cones]  # fmt: skip
    for other in others:
        rows = rows[cone.reaches[rows] | ~other.reaches[rows]]
    return rows


def _find_slabs(region: DraftRegion) -> None:
    """The part of every parameter that holds a rank's features."""
    for parts, side in ((region.columns, "input_features"), (region.rows, "output_features")):
        for pattern, kept in parts.items():
            calls = [
                call
                for consumer in region.consumers
                for call in (consumer.calls if parts is region.columns else consumer.upstream)
                if call.pattern == pattern
            ]
            uses: list[Features] = [getattr(call, side) for call in calls]
            slab = find_slab(uses, kept) if all(uses) else None
            if slab is None:
                region.reason = f"what a rank needs of {pattern} is no part of it along one dimension"
                return
            region.slabs[pattern] = slab


def _merge(region: DraftRegion, pattern: str, rows: list[torch.Tensor]) -> None:
    """A producer of several consumers keeps what any of them needs."""
    before = region.rows.get(pattern)
    if before is not None:
        rows = [torch.unique(torch.cat(pair)) for pair in zip(before, rows, strict=True)]
    region.rows[pattern] = rows


def ranges_of(indices: torch.Tensor) -> tuple[Range, ...]:
    """Ascending indices as half-open ranges."""
    if not len(indices):
        return ()
    breaks = (indices[1:] != indices[:-1] + 1).nonzero().flatten() + 1
    starts = indices[torch.cat([torch.zeros(1, dtype=torch.long), breaks])]
    stops = indices[torch.cat([breaks - 1, torch.tensor([len(indices) - 1])])] + 1
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))
