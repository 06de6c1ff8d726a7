"""What is noted of a run of a model: every use of a weight, and what the model gave. Knows no ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from shoal.plan.contraction import Contraction
from shoal.plan.drive import Batch, Pass
from shoal.plan.features import Features
from shoal.plan.types import pattern_of

__all__ = ["Call", "Kind", "Recording"]

Kind = Literal["linear", "embedding", "product", "raw"]


@dataclass(slots=True)
class Call:
    """One use of one weight."""

    weight: str  # full parameter name, as its module has it
    kind: Kind  # product: by code of its own that multiplies or looks up; raw: in any other way
    inputs: tuple[torch.Tensor, ...]  # floating-point; of a linear or a product the one input
    output: torch.Tensor  # the leaf
    index: int  # how often the weight was used before
    step: int  # 0 prefill, 1 decode
    input_features: Features | None = None  # None: the last dimension
    output_features: Features | None = None  # None: the last dimension
    function: str = ""  # name of the operation
    users: tuple[str, ...] = ()  # of a product: modules whose code took hold of the weight
    how: Contraction | None = None  # of a product
    pattern: str = ""  # of the weight, or another name for it and its like

    def __post_init__(self) -> None:
        self.pattern = self.pattern or pattern_of(self.weight)

    @property
    def is_product(self) -> bool:
        """Whether it sums over features of one input, so that a rank can do a part of the sum."""
        return self.kind in ("linear", "product") and len(self.inputs) == 1

    @property
    def consumed(self) -> torch.Tensor:
        """The input as ``[..., features]``."""
        return self.input_features.flatten(self.inputs[0]) if self.input_features else self.inputs[0]

    @property
    def num_outputs(self) -> int:
        """Number of output features."""
        return self.output_features.count if self.output_features else self.output.shape[-1]

    def produced(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of the output's shape as ``[..., features]``."""
        return self.output_features.flatten(like) if self.output_features else like


@dataclass(slots=True)
class Recording:
    """What one batch did: calls in order, the model's outputs and caches per pass, arguments of modules."""

    batch: Batch
    calls: list[Call] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    arguments: dict[tuple[str, str, int], torch.Tensor] = field(default_factory=dict)
    operations: frozenset[tuple[str, int]] = frozenset()  # names of what was done, and how often
    taken: list[tuple[str, torch.Tensor]] = field(default_factory=list)  # operations that decide, by what
    draws: frozenset[str] = frozenset()  # random operations of the model's own code
    num_broadcasts: int = 0  # products of real tensors of which one is repeated along a batch dimension
    num_stubs: int = 0  # parameters without values at the time

    def by_key(self) -> dict[tuple[str, int], Call]:
        return {(call.weight, call.index): call for call in self.calls}

    @property
    def has_decode(self) -> bool:
        return len(self.passes) > 1
