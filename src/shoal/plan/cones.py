"""Measures which output features of earlier weights reach which input features of later ones.
Knows no ranks.

For a consumer with ``width`` input features and each block size that divides it, a few vector-Jacobian
products tell for *every* producer feature at once whether all it reaches lies in one block, and which:
the features whose block number has bit b set, and those where it is clear, are probed together, so
2·log2(blocks) products number them all (group testing). Heads, KV groups, neurons and any interleaving
of a fused projection come out as block sizes, without a table of layouts.

A gradient that is NaN counts as reaching. One that is absent proves nothing: what this module calls
separate is checked again by replaying rank-local code.

Weights of one pattern are taken together: the experts of a layer, of which some see a token or none, say
the same about the same features, and what one of them leaves open another may show.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from shoal.errors import PlanError
from shoal.plan.calls import Call, Recording

__all__ = ["Cone", "Consumer", "Flow", "measure", "support"]

_ENOUGH_TOKENS = 16  # of the inputs that are measured for one consumer, if there are so many
_MOST_CALLS = 8  # measured for one consumer, and looked at in one layer

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # inputs [..., width] and random weights of their shape


@dataclass(slots=True)
class Cone:
    """For each output feature of a producer, the block of consumer features that it reaches.

    ``block_size[f]`` is the smallest measured block that holds all that feature f reaches, ``block[f]``
    which one; ``reaches[f]`` whether it reaches anything that was seen. All of shape [features].
    """

    producer: str  # parameter pattern
    block_size: torch.Tensor
    block: torch.Tensor
    reaches: torch.Tensor

    def sizes(self) -> list[int]:
        """The block sizes that occur, ascending."""
        return [int(size) for size in torch.unique(self.block_size[self.reaches])]

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Features that reach consumer features ``start`` to ``stop``, ascending; unknown ones always."""
        first = self.block * self.block_size
        hit = (first < stop) & (first + self.block_size > start)
        return (hit | ~self.reaches).nonzero().flatten()


@dataclass(slots=True)
class Consumer:
    """A product whose input features come, part by part, from the features of producers."""

    calls: list[Call]  # uses that were measured, the one with the most tokens first
    width: int  # input features
    cones: dict[str, Cone]  # by producer's pattern
    upstream: list[Call]  # the calls whose outputs were watched
    whole: set[str] = field(default_factory=set)  # producer patterns that it needs whole on every rank

    @property
    def call(self) -> Call:
        """The use with the most tokens."""
        return self.calls[0]


@dataclass(slots=True)
class Flow:
    """What was measured: consumers that can be split, and the patterns that must stay whole."""

    consumers: list[Consumer] = field(default_factory=list)
    mixed: set[str] = field(default_factory=set)  # producers that something needs whole
    decided: dict[str, str] = field(default_factory=dict)  # some of those -> the operation that decides
    num_products: int = 0


def support(
    flow: Flow,
    x: torch.Tensor,
    weights: torch.Tensor,
    features: list[int] | torch.Tensor,
    upstream: Sequence[Call],
) -> dict[str, torch.Tensor]:
    """Which output features of each upstream pattern reach the given features of ``x`` (bool masks)."""
    cotangent = torch.zeros_like(x)
    cotangent[..., features] = weights[..., features]
    flow.num_products += 1
    leaves = [call.output for call in upstream]
    found: dict[str, torch.Tensor] = {}
    gradients = torch.autograd.grad(x, leaves, cotangent, retain_graph=True, allow_unused=True)
    for call, gradient in zip(upstream, gradients, strict=True):
        size = call.num_outputs
        if gradient is None:
            mask = torch.zeros(size, dtype=torch.bool)
        else:  # NaN != 0: unknown counts as reaching
            mask = (call.produced(gradient).reshape(-1, size) != 0).any(0)
        before = found.get(call.pattern)
        if before is not None and len(before) != size:
            raise PlanError(f"uses of {call.pattern} differ in the number of their features")
        found[call.pattern] = mask if before is None else before | mask
    return found


def measure(recording: Recording) -> Flow:
    """Measure every kind of consumer in the recording.

    Raises:
        PlanError: weights of one pattern are used in different ways.
        Exception: whatever the backward code of the model raises.
    """
    flow = Flow(mixed={call.pattern for call in recording.calls if call.kind == "raw"})
    generator = torch.Generator().manual_seed(5)
    candidates: dict[tuple[str, int], list[tuple[Call, list[Call]]]] = {}
    for position in _worth_a_look(recording.calls):
        call = recording.calls[position]
        for x in (call.consumed,) if call.is_product else call.inputs:
            _look_at(flow, generator, call, x, recording.calls[:position], candidates)
    for name, source in recording.taken:
        if source.requires_grad:
            reached = _reached(flow, source, _random_like(source, generator), recording.calls)
            flow.decided |= dict.fromkeys(reached.keys() - flow.decided.keys(), name)
    flow.mixed |= flow.decided.keys()
    for output in (tensor for run in recording.passes for tensor in run.outputs):
        if output.requires_grad:
            flow.mixed |= _reached(flow, output, _random_like(output, generator), recording.calls).keys()
    for (_, width), found in candidates.items():
        for uses in _kinds(found, flow.mixed):
            consumer = _consumer(flow, width, uses, generator)
            if consumer is not None:
                flow.consumers.append(consumer)
    return flow


def _kinds(found: Sequence[tuple[Call, list[Call]]], mixed: set[str]) -> list[list[tuple[Call, list[Call]]]]:
    """The uses by the set of what feeds them: layers of one stack may differ in their code."""
    layers: dict[str, list[tuple[Call, list[Call]]]] = {}
    for call, upstream in found:
        layers.setdefault(_layer(call), []).append((call, upstream))
    kinds: dict[frozenset[str], list[tuple[Call, list[Call]]]] = {}
    for uses in layers.values():
        producers = frozenset(entry.pattern for _, upstream in uses for entry in upstream) - mixed
        kinds.setdefault(producers, []).extend(uses)
    return list(kinds.values())


def _worth_a_look(calls: Sequence[Call]) -> list[int]:
    """Positions of the calls to look at: of the many experts of a layer, those that got the most tokens."""
    groups: dict[tuple[str, str, int], list[int]] = {}
    for position, call in enumerate(calls):
        groups.setdefault((call.pattern, _layer(call), call.step), []).append(position)
    chosen: set[int] = set()
    for positions in groups.values():
        weights = {calls[position].weight for position in positions}
        if calls[positions[0]].kind == "product" or len(weights) > 1:
            positions = sorted(positions, key=lambda position: -calls[position].output.numel())[:_MOST_CALLS]
        chosen.update(positions)
    return sorted(chosen)


def _layer(call: Call) -> str:
    """The first number in a weight's name."""
    return next((part for part in call.weight.split(".") if part.isdigit()), "")


def _consumer(
    flow: Flow, width: int, found: Sequence[tuple[Call, list[Call]]], generator: torch.Generator
) -> Consumer | None:
    """The consumer measured on uses in its last layer, so that what earlier layers hand on is seen too."""
    last = _layer(found[-1][0])
    uses = [(call, upstream) for call, upstream in found if _layer(call) == last]
    uses.sort(key=lambda use: -use[0].inputs[0].numel())
    uses = list(_enough(uses, width))
    watched = {id(entry): entry for _, upstream in uses for entry in upstream}
    upstream = [call for call in watched.values() if call.pattern not in flow.mixed]
    if not upstream:
        return None
    whole = {call.pattern for call in watched.values()} & flow.mixed
    consumer = Consumer([call for call, _ in uses], width, {}, upstream, whole)
    consumer.cones = _cones(flow, _pairs(consumer.calls, generator), width, upstream)
    for layer in dict.fromkeys(_layer(call) for call, _ in found if _layer(call) != last):
        _complete(flow, consumer, [use for use in found if _layer(use[0]) == layer], generator)
    _settle(consumer)
    return consumer


def _complete(
    flow: Flow, consumer: Consumer, uses: Sequence[tuple[Call, list[Call]]], generator: torch.Generator
) -> None:
    """Measure in another layer what the last one left open of weights outside the stack: one weight may hold
    features for every layer (prompts made into keys and values).
    """
    known = {call.pattern: call for call in consumer.upstream}
    is_open = {name for name, cone in consumer.cones.items() if not bool(cone.reaches.all())}
    watched = {id(entry): entry for _, upstream in uses for entry in upstream}.values()
    open_calls = [call for call in watched if call.pattern in is_open and call is known[call.pattern]]
    if open_calls:
        cones = _cones(flow, _pairs([call for call, _ in uses], generator), consumer.width, open_calls)
        for name, other in cones.items():
            cone = consumer.cones[name]
            new = other.reaches & ~cone.reaches
            cone.block_size[new], cone.block[new] = other.block_size[new], other.block[new]
            cone.reaches |= new


def _pairs(calls: Sequence[Call], generator: torch.Generator) -> Pairs:
    return [(call.consumed, _random_like(call.consumed, generator)) for call in calls]


def _enough(uses: Sequence[tuple[Call, list[Call]]], width: int) -> Iterator[tuple[Call, list[Call]]]:
    """Uses with enough tokens, and every further one that something else reaches."""
    seen: set[str] = set()
    num_tokens, num_calls = 0, 0
    for call, upstream in uses:
        patterns = {entry.pattern for entry in upstream}
        is_wanted = num_tokens < _ENOUGH_TOKENS and num_calls < _MOST_CALLS
        if is_wanted or not patterns <= seen:
            yield call, upstream
            seen |= patterns
            num_tokens += call.inputs[0].numel() // width
            num_calls += 1


def _look_at(
    flow: Flow,
    generator: torch.Generator,
    call: Call,
    x: torch.Tensor,
    before: list[Call],
    candidates: dict[tuple[str, int], list[tuple[Call, list[Call]]]],
) -> None:
    """Note what ``x`` mixes; keep it as a candidate if its first and last features have different cones."""
    if not x.requires_grad or not before or not x.numel():
        return
    random = _random_like(x, generator)
    reached = _reached(flow, x, random, before)
    if not reached:
        return
    if not call.is_product:
        flow.mixed |= reached.keys()
        return
    upstream = [entry for calls in reached.values() for entry in calls]
    plain = [entry for entry in upstream if entry.kind != "raw"]
    if not plain:
        return
    first = support(flow, x, random, [0], plain)
    last = support(flow, x, random, [x.shape[-1] - 1], plain)
    for name, mask in first.items():
        if torch.equal(mask, last[name]) and mask.any():
            flow.mixed.add(name)
    if call.step == 0 and any(not torch.equal(mask, last[name]) for name, mask in first.items()):
        candidates.setdefault((call.pattern, x.shape[-1]), []).append((call, upstream))


def _reached(
    flow: Flow, x: torch.Tensor, weights: torch.Tensor, before: Sequence[Call]
) -> dict[str, list[Call]]:
    """The earlier calls whose outputs reach ``x`` at all, by pattern."""
    flow.num_products += 1
    leaves = [call.output for call in before]
    gradients = torch.autograd.grad(x, leaves, weights, retain_graph=True, allow_unused=True)
    found: dict[str, list[Call]] = {}
    for call, gradient in zip(before, gradients, strict=True):
        if gradient is not None and bool((gradient != 0).any()):
            found.setdefault(call.pattern, []).append(call)
    return found


def _cones(flow: Flow, pairs: Pairs, width: int, upstream: Sequence[Call]) -> dict[str, Cone]:
    """Block size and block of every upstream feature, smallest block sizes first."""
    cones: dict[str, Cone] = {}
    for call in upstream:
        zeros = torch.zeros(call.num_outputs, dtype=torch.long)
        cones.setdefault(call.pattern, Cone(call.pattern, zeros, zeros.clone(), zeros.bool()))
    open_calls = list(upstream)
    for block_size in (size for size in range(1, width + 1) if width % size == 0):
        if block_size < _smallest_possible(cones, block_size):
            continue
        _number_blocks(flow, pairs, block_size, open_calls, cones)
        open_calls = [call for call in open_calls if bool((cones[call.pattern].block_size == 0).any())]
        if not open_calls:
            break
    return cones


def _smallest_possible(cones: dict[str, Cone], block_size: int) -> int:
    """A lower bound on the block size of what is still open, from how far apart its features reach."""
    spans = [cone.block[cone.block_size == 0] for cone in cones.values()]
    spans = [span for span in spans if len(span)]
    return min((int(span.min()) for span in spans), default=block_size)


def _number_blocks(
    flow: Flow, pairs: Pairs, block_size: int, upstream: Sequence[Call], cones: dict[str, Cone]
) -> None:
    """Give every feature that reaches only one block of this size its block.

    While a feature is open its ``block`` holds a lower bound on its block size: block numbers that
    differ in bit b, and perhaps below, but do not in any higher bit, span at least 2^(b-1) blocks.
    """
    width = pairs[0][0].shape[-1]
    numbers = torch.arange(width) // block_size
    num_bits = max(1, math.ceil(math.log2(max(1, width // block_size))))
    code = {name: torch.zeros_like(cone.block) for name, cone in cones.items()}
    highest = {name: torch.full_like(cone.block, -1) for name, cone in cones.items()}
    for bit in range(num_bits):
        is_set = (numbers >> bit) & 1 == 1
        ones = _joint_support(flow, pairs, is_set, upstream)
        zeros = _joint_support(flow, pairs, ~is_set, upstream)
        for name, mask in ones.items():
            code[name][mask] |= 1 << bit
            highest[name][mask & zeros[name]] = bit
            cones[name].reaches |= mask | zeros[name]
    for name in {call.pattern for call in upstream}:
        cone = cones[name]
        is_open = cone.block_size == 0
        in_one_block = is_open & (highest[name] < 0)
        cone.block_size[in_one_block] = block_size
        cone.block[in_one_block] = code[name][in_one_block]
        still_open = is_open & ~in_one_block
        cone.block[still_open] = block_size * (1 << highest[name][still_open].clamp(min=1)) // 2
        _settle_at_once(cone, block_size, width, still_open, code[name], highest[name])


def _settle_at_once(
    cone: Cone,
    block_size: int,
    width: int,
    still_open: torch.Tensor,
    code: torch.Tensor,
    highest: torch.Tensor,
) -> None:
    """Number features by larger blocks without measuring them, where those are the only ones possible.

    Blocks whose numbers differ in bit b and in no higher one lie in one block of 2^(b+1) of them, and in no
    half of it; so that is their size unless the width has other divisors below.
    """
    for bit in torch.unique(highest[still_open]).tolist():
        size = block_size << (bit + 1)
        powers = {block_size << power for power in range(bit + 2)}
        if width % size == 0 and all(width % other or other in powers for other in range(block_size, size)):
            members = still_open & (highest == bit)
            cone.block_size[members] = size
            cone.block[members] = code[members] >> (bit + 1)


def _joint_support(
    flow: Flow, pairs: Pairs, features: torch.Tensor, upstream: Sequence[Call]
) -> dict[str, torch.Tensor]:
    """What reaches the features in any of the inputs."""
    found: dict[str, torch.Tensor] = {}
    for x, weights in pairs:
        for name, mask in support(flow, x, weights, features, upstream).items():
            found[name] = found[name] | mask if name in found else mask
    return found


def _settle(consumer: Consumer) -> None:
    """Keep only block sizes at which no smaller block straddles a border.

    What a value feature of a KV group reaches is a feature in each of its heads, which may happen to fit
    in an aligned block that is no whole number of heads. Such a feature is given the next size that is
    a division of the consumer for all features.
    """
    cones = list(consumer.cones.values())
    sizes = sorted({size for cone in cones for size in cone.sizes()} | {consumer.width})
    sound = [size for size in sizes if not any(_straddles(cone, size) for cone in cones)]
    for cone in cones:
        for size in cone.sizes():
            if size in sound:
                continue
            members = cone.reaches & (cone.block_size == size)
            start = cone.block[members] * size
            larger = next(candidate for candidate in sound if candidate > size)
            cone.block_size[members] = larger
            cone.block[members] = start // larger


def _straddles(cone: Cone, size: int) -> bool:
    """Whether a block of at most that size crosses a border between blocks of that size."""
    start = cone.block * cone.block_size
    crosses = start // size != (start + cone.block_size - 1) // size
    return bool((crosses & (cone.block_size <= size) & cone.reaches).any())


def _random_like(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.empty_like(x).normal_(generator=generator).detach()
