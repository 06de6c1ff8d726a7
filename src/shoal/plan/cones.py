"""Measures which output features of earlier weights reach which input features of later ones.
Knows no ranks.

For a consumer with ``width`` input features and each block size that divides it, a few vector-Jacobian
products tell for *every* producer feature at once whether all it reaches lies in one block, and which:
the features whose block number has bit b set, and those where it is clear, are probed together, so
2·log2(blocks) products number them all (group testing). Heads, KV groups, neurons and any interleaving
of a fused projection come out as block sizes, without a table of layouts.

A gradient that is NaN counts as reaching. One that is absent proves nothing: what this module calls
separate is checked again by replaying rank-local code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shoal.plan.probe import Call, Recording
from shoal.plan.types import pattern_of

__all__ = ["Cone", "Consumer", "Flow", "measure", "support"]


@dataclass(slots=True)
class Cone:
    """For each output feature of a producer, the block of consumer features that it reaches.

    ``block_size[f]`` is the smallest measured block that holds all that feature f reaches, ``block[f]``
    which one; ``reaches[f]`` whether it reaches anything that was seen. All of shape [features].
    """

    producer: str  # full parameter name
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
    """A linear whose input features come, part by part, from the features of producers."""

    call: Call
    width: int  # input features
    cones: dict[str, Cone]  # by producer's full name
    upstream: list[Call]  # the calls whose outputs were watched
    whole: set[str] = field(default_factory=set)  # producer patterns that it needs whole on every rank


@dataclass(slots=True)
class Flow:
    """What was measured: consumers that can be split, and the patterns that must stay whole."""

    consumers: list[Consumer] = field(default_factory=list)
    mixed: set[str] = field(default_factory=set)  # producers that something needs whole
    num_products: int = 0


def support(
    flow: Flow,
    x: torch.Tensor,
    weights: torch.Tensor,
    features: list[int] | torch.Tensor,
    upstream: Sequence[Call],
) -> dict[str, torch.Tensor]:
    """Which output features of each upstream weight reach the given features of ``x`` (bool masks)."""
    cotangent = torch.zeros_like(x)
    cotangent[..., features] = weights[..., features]
    flow.num_products += 1
    leaves = [call.output for call in upstream]
    found: dict[str, torch.Tensor] = {}
    gradients = torch.autograd.grad(x, leaves, cotangent, retain_graph=True, allow_unused=True)
    for call, gradient in zip(upstream, gradients, strict=True):
        size = call.output.shape[-1]
        if gradient is None:
            mask = torch.zeros(size, dtype=torch.bool)
        else:
            mask = (gradient.reshape(-1, size) != 0).any(0)  # NaN != 0: unknown counts as reaching
        found[call.weight] = found[call.weight] | mask if call.weight in found else mask
    return found


def measure(recording: Recording) -> Flow:
    """Measure every kind of consumer in the recording."""
    flow = Flow()
    generator = torch.Generator().manual_seed(5)
    candidates: dict[tuple[str, int], Consumer] = {}
    for position, call in enumerate(recording.calls):
        for x in call.inputs:
            _look_at(flow, generator, call, x, recording.calls[:position], candidates)
    for output in (tensor for run in recording.passes for tensor in run.outputs):
        if output.requires_grad:
            flow.mixed |= _reached(flow, output, _random_like(output, generator), recording.calls).keys()
    for consumer in candidates.values():
        upstream = [call for call in consumer.upstream if call.pattern not in flow.mixed]
        consumer.whole = {call.pattern for call in consumer.upstream} & flow.mixed
        if upstream:
            consumer.upstream = upstream
            if all(call.kind != "raw" for call in upstream):  # else its region is refused as it is
                x = consumer.call.inputs[0]
                consumer.cones = _cones(flow, x, _random_like(x, generator), upstream)
                _settle(consumer)
            flow.consumers.append(consumer)
    return flow


def _look_at(
    flow: Flow,
    generator: torch.Generator,
    call: Call,
    x: torch.Tensor,
    before: list[Call],
    candidates: dict[tuple[str, int], Consumer],
) -> None:
    """Note what ``x`` mixes; keep it as a candidate if its first and last features have different cones."""
    if not x.requires_grad or not before:
        return
    random = _random_like(x, generator)
    reached = _reached(flow, x, random, before)
    if not reached:
        return
    upstream = [entry for calls in reached.values() for entry in calls]
    if call.kind != "linear":
        flow.mixed |= reached.keys()
        return
    plain = [entry for entry in upstream if entry.kind != "raw"]
    if not plain:
        return
    first = support(flow, x, random, [0], plain)
    last = support(flow, x, random, [x.shape[-1] - 1], plain)
    for name, mask in first.items():
        if torch.equal(mask, last[name]) and mask.any():
            flow.mixed.add(pattern_of(name))
    is_prefill = call.step == 0 and x.numel() > x.shape[-1]
    if is_prefill and any(not torch.equal(mask, last[name]) for name, mask in first.items()):
        # The last of a kind, so that what earlier layers hand on is seen too.
        candidates[call.pattern, x.shape[-1]] = Consumer(call, x.shape[-1], {}, upstream)


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


def _cones(flow: Flow, x: torch.Tensor, weights: torch.Tensor, upstream: Sequence[Call]) -> dict[str, Cone]:
    """Block size and block of every upstream feature, smallest block sizes first."""
    width = x.shape[-1]
    cones: dict[str, Cone] = {}
    for call in upstream:
        size = call.output.shape[-1]
        zeros = torch.zeros(size, dtype=torch.long)
        cones.setdefault(call.weight, Cone(call.weight, zeros, zeros.clone(), zeros.bool()))
    open_calls = list(upstream)
    for block_size in (size for size in range(1, width + 1) if width % size == 0):
        if block_size < _smallest_possible(cones, block_size):
            continue
        _number_blocks(flow, x, weights, block_size, open_calls, cones)
        open_calls = [call for call in open_calls if bool((cones[call.weight].block_size == 0).any())]
        if not open_calls:
            break
    return cones


def _smallest_possible(cones: dict[str, Cone], block_size: int) -> int:
    """A lower bound on the block size of what is still open, from how far apart its features reach."""
    spans = [cone.block[cone.block_size == 0] for cone in cones.values()]
    spans = [span for span in spans if len(span)]
    return min((int(span.min()) for span in spans), default=block_size)


def _number_blocks(
    flow: Flow,
    x: torch.Tensor,
    weights: torch.Tensor,
    block_size: int,
    upstream: Sequence[Call],
    cones: dict[str, Cone],
) -> None:
    """Give every feature that reaches only one block of this size its block.

    While a feature is open its ``block`` holds a lower bound on its block size: block numbers that
    differ in bit b, and perhaps below, but do not in any higher bit, span at least 2^(b-1) blocks.
    """
    numbers = torch.arange(x.shape[-1]) // block_size
    num_bits = max(1, math.ceil(math.log2(max(1, x.shape[-1] // block_size))))
    code = {name: torch.zeros_like(cone.block) for name, cone in cones.items()}
    highest = {name: torch.full_like(cone.block, -1) for name, cone in cones.items()}
    for bit in range(num_bits):
        is_set = (numbers >> bit) & 1 == 1
        ones = support(flow, x, weights, is_set, upstream)
        zeros = support(flow, x, weights, ~is_set, upstream)
        for name, mask in ones.items():
            code[name][mask] |= 1 << bit
            highest[name][mask & zeros[name]] = bit
            cones[name].reaches |= mask | zeros[name]
    for name in {call.weight for call in upstream}:
        cone = cones[name]
        is_open = cone.block_size == 0
        in_one_block = is_open & (highest[name] < 0)
        cone.block_size[in_one_block] = block_size
        cone.block[in_one_block] = code[name][in_one_block]
        still_open = is_open & ~in_one_block
        cone.block[still_open] = block_size * (1 << highest[name][still_open].clamp(min=1)) // 2


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
