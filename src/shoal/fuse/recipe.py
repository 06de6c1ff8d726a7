"""What a layer computes, as data: a list of steps over named rows of numbers. Knows no kernel and no module
class; weights are named, not held.

Values are named by strings; ``x`` is the layer's input. Every step reads values that earlier steps made.
Shape letters: T tokens, W the layer's width, Hq query heads, H KV heads, E and Ev widths of a key and a value
head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.attention.base import Variant

__all__ = [
    "INPUT",
    "Attend",
    "Combine",
    "Foreign",
    "Gate",
    "HeadNorm",
    "LayerRecipe",
    "Norm",
    "Piece",
    "Project",
    "Rotary",
    "Step",
    "modules",
    "reads",
]

INPUT = "x"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some output features of one linear module, each times a factor.

    ``rows[i]`` is the feature of the module that becomes feature i; both tensors are [N].
    """

    module: str  # path within the layer
    rows: torch.Tensor  # int64
    factors: torch.Tensor  # float32

    @property
    def is_whole(self) -> bool:
        """Whether rows are 0, 1, 2 ... and factors 1."""
        order = torch.arange(len(self.rows))
        return bool(torch.equal(self.rows, order)) and bool((self.factors == 1).all())


@dataclass(frozen=True, slots=True)
class Norm:
    """``out`` [T, W] = RMSNorm or LayerNorm of ``source`` [T, W] by a module's weight and bias."""

    out: str
    source: str
    module: str
    is_centred: bool  # LayerNorm
    adds_one: bool  # multiplies by 1 + weight
    has_weight: bool
    has_bias: bool
    eps: float


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """A norm of each head, or of ``width`` features together, of the projected queries or keys."""

    module: str
    width: int
    is_centred: bool
    adds_one: bool
    has_weight: bool
    has_bias: bool
    eps: float


@dataclass(frozen=True, slots=True)
class Project:
    """``out`` [T, N] = activation(``source`` W^T + b), pieces one after the other."""

    out: str
    source: str
    pieces: tuple[Piece, ...]
    activation: str = "linear"
    is_summed: bool = False  # over ranks: each has some of the inputs


@dataclass(frozen=True, slots=True)
class Gate:
    """``out`` [T, N] = activation(gate(``source``)) * up(``source``)."""

    out: str
    source: str
    gate: Piece
    up: Piece
    activation: str


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotation by the tables that the layer is called with: pairs (i, i + width / 2), or (2i, 2i + 1)."""

    width: int
    is_interleaved: bool
    table_step: int  # pair i's angle is at i * table_step of the table
    is_sine_first: bool = False  # of the two tables


@dataclass(frozen=True, slots=True)
class Attend:
    """``out`` [T, Hq * Ev] = attention over pages of ``source`` [T, Hq * E + H * E + H * Ev]."""

    out: str
    source: str
    query_heads: int
    heads: int
    key_width: int
    value_width: int
    variant: Variant
    rotary: Rotary | None
    query_norm: HeadNorm | None
    key_norm: HeadNorm | None
    module: str  # that attention was called from
    sinks: str  # path of the parameter within the layer; empty: none


@dataclass(frozen=True, slots=True)
class Combine:
    """``out`` [T, W] = the sum of values, each times a factor."""

    out: str
    terms: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Foreign:
    """``out`` [T, W] = what a module of the layer makes of ``source`` [T, W] alone, by its own code.

    It computes each token for itself; over ranks it sums for itself, and all ranks call it alike.
    """

    out: str
    source: str
    module: str


Step = Norm | Project | Gate | Attend | Combine | Foreign


def reads(step: Step) -> list[str]:
    """Values that a step reads."""
    return [name for name, _ in step.terms] if isinstance(step, Combine) else [step.source]


def modules(step: Step) -> list[str]:
    """Paths of the modules that a step stands for, but for the norms of heads."""
    if isinstance(step, Project):
        return [piece.module for piece in step.pieces]
    if isinstance(step, Gate):
        return [step.gate.module, step.up.module]
    return [step.module] if isinstance(step, (Norm, Foreign, Attend)) else []


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """A layer's steps in order, and which value is its output."""

    steps: tuple[Step, ...]
    output: str
    is_tuple: bool  # the layer returns its output first in a tuple
    tables: str  # the argument that holds cosines and sines, [1, T, width]; empty: none

    @property
    def linears(self) -> list[str]:
        """Paths of the linear modules that the steps stand for."""
        steps = (step for step in self.steps if isinstance(step, (Project, Gate)))
        return list(dict.fromkeys(path for step in steps for path in modules(step)))

    @property
    def foreign(self) -> list[str]:
        """Paths of the modules that go on computing for themselves."""
        return [step.module for step in self.steps if isinstance(step, Foreign)]

    @property
    def outline(self) -> str:
        """Which steps there are and which values they make: what all ranks have in common."""
        steps = (f"{type(step).__name__} {step.out} {getattr(step, 'is_summed', '')}" for step in self.steps)
        return f"{'; '.join(steps)}: {self.output} {self.tables}"
