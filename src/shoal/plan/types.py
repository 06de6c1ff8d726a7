"""The plan: which rank holds which slice of which tensor, as data. Knows neither torch nor any model.

A plan speaks of parameters by *pattern*: the parameter's full name with every path component that is a
number replaced by ``*`` (``model.layers.*.self_attn.q_proj.weight``), but for the number of what has a
``weight`` or a ``bias`` itself (``h.*.mlp.0.weight``): ``mlp.0`` and ``mlp.2`` of a sequence are two linears,
not one that occurs twice. An exact name, where it occurs as a key, wins over its pattern. Ranges are
half-open ``(start, stop)`` along one dimension of the tensor as the checkpoint stores it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from shoal.errors import PlanError

__all__ = [
    "PLAN_VERSION",
    "ArgumentSlice",
    "BiasRule",
    "KeyValueHeads",
    "Operation",
    "Patch",
    "Plan",
    "Range",
    "Reduction",
    "Region",
    "Reshape",
    "Scalar",
    "Split",
    "TensorSlice",
    "even_ranges",
    "pattern_of",
    "total",
]

PLAN_VERSION = 2

Range = tuple[int, int]
Scalar = str | int | float | bool

Operation = Literal["column", "row", "gather", "vocab", "experts", "once", "replicate"]
"""How a weight is used once it is split.

=========  ==========================================================================================
column     output features are split, the result stays on the rank (no collective)
row        input features are split, the results are summed over ranks: by the operation that uses the
           weight, or later, where a :class:`Reduction` says so
gather     output features are split, the results are concatenated on every rank
vocab      rows of an embedding table are split; looked-up rows are summed over ranks
experts    whole experts of a stack are dealt to ranks; what they give is summed where a
           :class:`Reduction` says so
once       a term that is added before a reduction: whole on rank 0, zeros on the others
replicate  whole on every rank; ``reason`` says why
=========  ==========================================================================================

Weights are those of linears and embeddings, and raw parameters that a module's own code multiplies by
(stacked experts, an einsum's factors), which have no module of their own.
"""

_OWN = ("weight", "bias")  # of a linear, an embedding or a norm, whose name comes before it

BiasRule = Literal["split", "once", "none"]
"""``split``: the bias is cut like the output features. ``once``: whole on every rank, added after the
reduction. ``none``: there is no bias."""


@functools.lru_cache(maxsize=1 << 16)
def pattern_of(name: str) -> str:
    """``a.0.fc1.weight`` -> ``a.*.fc1.weight``: only whole numeric components become ``*``.

    The number of what has a weight or a bias itself stays: ``a.0.fc.2.weight`` -> ``a.*.fc.2.weight``. The
    name of a module is no parameter's: ``a.0.fc.2`` -> ``a.*.fc.*``.
    """
    parts = name.split(".")
    kept = len(parts) - 2 if parts[-1] in _OWN else -1
    return ".".join("*" if part.isdigit() and i != kept else part for i, part in enumerate(parts))


def total(ranges: Iterable[Range]) -> int:
    """How many indices the ranges hold."""
    return sum(stop - start for start, stop in ranges)


def even_ranges(size: int, ranks: int) -> tuple[tuple[Range, ...], ...]:
    """``size`` indices dealt to ``ranks`` contiguous parts whose sizes differ by at most one."""
    bounds = [size * rank // ranks for rank in range(ranks + 1)]
    return tuple(((bounds[rank], bounds[rank + 1]),) for rank in range(ranks))


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """What one rank reads of one checkpoint tensor: ``ranges`` along ``dim``, in that order."""

    dim: int
    ranges: tuple[Range, ...]
    size: int | None = None  # of the whole tensor along ``dim``; None: whatever holds the ranges

    @property
    def length(self) -> int:
        """Size of the rank's tensor along ``dim``."""
        return total(self.ranges)


@dataclass(frozen=True, slots=True)
class Split:
    """What happens to the parameters of one pattern.

    ``dim`` and ``size`` are the split dimension of the full tensor and its length; ``ranges`` has one
    entry a rank. All three are 0 or empty where the operation is ``replicate``.
    """

    op: Operation
    dim: int = 0
    size: int = 0
    ranges: tuple[tuple[Range, ...], ...] = ()
    bias: BiasRule = "none"
    reason: str = ""

    @property
    def is_split(self) -> bool:
        """Whether ranks hold less than the whole tensor."""
        return self.op not in ("replicate", "once")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Length along ``dim`` on each rank."""
        return tuple(total(ranges) for ranges in self.ranges)

    def to_dict(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "dim": self.dim,
            "size": self.size,
            "ranges": [[list(pair) for pair in ranges] for ranges in self.ranges],
            "bias": self.bias,
            "reason": self.reason,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Split:
        if data["op"] not in get_args(Operation) or data["bias"] not in get_args(BiasRule):
            raise PlanError(f"unknown operation or bias rule: {data['op']!r}, {data['bias']!r}")
        ranges = tuple(_ranges(entry) for entry in data["ranges"])
        return cls(data["op"], int(data["dim"]), int(data["size"]), ranges, data["bias"], str(data["reason"]))


@dataclass(frozen=True, slots=True)
class Patch:
    """An integer that a module's own code needs changed on a rank.

    Applies to every module whose name matches ``module`` (a pattern), whose class is named
    ``class_name`` and whose ``attribute`` equals ``old``. ``config.x`` means attribute ``x`` of a private
    copy of the module's config.
    """

    module: str
    class_name: str
    attribute: str
    old: int
    values: tuple[int, ...]  # one a rank

    def to_dict(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "class": self.class_name,
            "attribute": self.attribute,
            "old": self.old,
            "values": list(self.values),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Patch:
        values = tuple(int(value) for value in data["values"])
        return cls(data["module"], data["class"], data["attribute"], int(data["old"]), values)


@dataclass(frozen=True, slots=True)
class ArgumentSlice:
    """A tensor argument of which a module gets only the rank's part (ALiBi, for one).

    ``dim`` counts from the end (-1 is the last): leading dimensions may come and go between calls. Along it
    the argument repeats a pattern of ``period`` indices (``batch * heads`` is ``batch`` repetitions of
    ``heads``); the rank keeps ``ranges`` of each repetition.
    """

    module: str  # pattern
    argument: str  # keyword, or "#2" for the third positional argument
    dim: int
    period: int
    ranges: tuple[tuple[Range, ...], ...]  # one entry a rank

    def to_dict(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "argument": self.argument,
            "dim": self.dim,
            "period": self.period,
            "ranges": [[list(pair) for pair in ranges] for ranges in self.ranges],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ArgumentSlice:
        ranges = tuple(_ranges(entry) for entry in data["ranges"])
        return cls(data["module"], data["argument"], int(data["dim"]), int(data["period"]), ranges)


@dataclass(frozen=True, slots=True)
class Reshape:
    """A width that a module's code takes from the shape of its input, and reshapes the rank's part to.

    In the forward of every module whose name matches ``module``, a ``view`` or ``reshape`` that does not
    fit the tensor's elements, and does with one size that equals ``old`` replaced by the rank's value, is
    done with that value. One that fits is left alone.
    """

    module: str  # pattern
    old: int
    values: tuple[int, ...]  # one a rank

    def to_dict(self) -> dict[str, Any]:
        return {"module": self.module, "old": self.old, "values": list(self.values)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Reshape:
        return cls(data["module"], int(data["old"]), tuple(int(value) for value in data["values"]))


@dataclass(frozen=True, slots=True)
class Reduction:
    """Partial results that are summed over ranks late, once, in a module's output.

    The row-split ``weights`` (and those split by ``experts``) inside the module leave their results
    partial; from there on the module's code is linear in them, so that summing output ``output`` of the
    module gives what summing each would. Without a reduction a row-split weight's own result is summed.
    """

    module: str  # pattern
    output: int  # position among the module's outputs where it returns several, else 0
    weights: tuple[str, ...]  # parameter patterns

    def to_dict(self) -> dict[str, Any]:
        return {"module": self.module, "output": self.output, "weights": list(self.weights)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Reduction:
        return cls(data["module"], int(data["output"]), tuple(str(name) for name in data["weights"]))


@dataclass(frozen=True, slots=True)
class KeyValueHeads:
    """What the KV cache of some layers holds for one token on each rank, as measured on its own tensors."""

    layers: tuple[Range, ...]  # layer indices
    heads: tuple[int, ...]  # one a rank
    key_dim: int  # features of a key head
    value_dim: int  # features of a value head
    is_split: bool  # False: every rank keeps all heads

    @property
    def num_layers(self) -> int:
        return total(self.layers)

    def to_dict(self) -> dict[str, Any]:
        return {
            "layers": [list(pair) for pair in self.layers],
            "heads": list(self.heads),
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "is_split": self.is_split,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KeyValueHeads:
        heads = tuple(int(count) for count in data["heads"])
        return cls(
            _ranges(data["layers"]),
            heads,
            int(data["key_dim"]),
            int(data["value_dim"]),
            bool(data["is_split"]),
        )


@dataclass(frozen=True, slots=True)
class Region:
    """Producers and the consumer that are split together, so that nothing travels between them."""

    consumer: str  # parameter pattern, op row
    producers: tuple[str, ...]  # parameter patterns, op column (or raw parameters)
    components: int  # heads, KV groups or neurons that are dealt out
    shares: tuple[int, ...]  # components a rank
    width: int  # input features of the consumer; of several dimensions (heads, features), their product
    divisions: tuple[int, ...]  # into how many blocks producers' features divide them: KV groups, heads ...
    duplicated: tuple[str, ...] = ()  # producers of which several ranks hold the same features

    def to_dict(self) -> dict[str, Any]:
        return {
            "consumer": self.consumer,
            "producers": list(self.producers),
            "components": self.components,
            "shares": list(self.shares),
            "width": self.width,
            "divisions": list(self.divisions),
            "duplicated": list(self.duplicated),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Region:
        return cls(
            data["consumer"],
            tuple(data["producers"]),
            int(data["components"]),
            tuple(int(count) for count in data["shares"]),
            int(data["width"]),
            tuple(int(count) for count in data["divisions"]),
            tuple(data["duplicated"]),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """How one model is split over ``tp`` ranks. Never changed once made."""

    tp: int
    model_class: str
    params: Mapping[str, Split] = field(default_factory=dict)
    patches: tuple[Patch, ...] = ()
    args: tuple[ArgumentSlice, ...] = ()
    reshapes: tuple[Reshape, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    kv: tuple[KeyValueHeads, ...] = ()
    regions: tuple[Region, ...] = ()
    evidence: Mapping[str, Scalar] = field(default_factory=dict)
    version: int = PLAN_VERSION

    def split_of(self, parameter: str) -> Split | None:
        """The split of a parameter by its full name, None where the plan does not mention it."""
        return self.params.get(parameter) or self.params.get(pattern_of(parameter))

    def to_dict(self) -> dict[str, Any]:
        """Lists, dicts, strings and numbers only: JSON and msgpack take it as it is."""
        return {
            "version": self.version,
            "tp": self.tp,
            "model_class": self.model_class,
            "params": {pattern: split.to_dict() for pattern, split in self.params.items()},
            "patches": [patch.to_dict() for patch in self.patches],
            "args": [argument.to_dict() for argument in self.args],
            "reshapes": [entry.to_dict() for entry in self.reshapes],
            "reductions": [entry.to_dict() for entry in self.reductions],
            "kv": [entry.to_dict() for entry in self.kv],
            "regions": [region.to_dict() for region in self.regions],
            "evidence": dict(self.evidence),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of :meth:`to_dict`.

        Raises:
            PlanError: the data is not a plan, or one of another version.
        """
        if not isinstance(data, Mapping) or data.get("version") != PLAN_VERSION:
            version = data.get("version") if isinstance(data, Mapping) else None
            raise PlanError(f"not a plan of version {PLAN_VERSION}: version is {version!r}")
        try:
            return cls(
                tp=int(data["tp"]),
                model_class=str(data["model_class"]),
                params={str(name): Split.from_dict(split) for name, split in data["params"].items()},
                patches=tuple(Patch.from_dict(entry) for entry in data["patches"]),
                args=tuple(ArgumentSlice.from_dict(entry) for entry in data["args"]),
                reshapes=tuple(Reshape.from_dict(entry) for entry in data["reshapes"]),
                reductions=tuple(Reduction.from_dict(entry) for entry in data["reductions"]),
                kv=tuple(KeyValueHeads.from_dict(entry) for entry in data["kv"]),
                regions=tuple(Region.from_dict(entry) for entry in data["regions"]),
                evidence=dict(data["evidence"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"damaged plan: {type(error).__name__}: {error}") from error


def _ranges(data: Iterable[Iterable[int]]) -> tuple[Range, ...]:
    """Pairs out of nested lists, checked to be half-open, ascending and not negative."""
    pairs = tuple(cast(Range, tuple(int(bound) for bound in pair)) for pair in data)
    if any(len(pair) != 2 or not 0 <= pair[0] <= pair[1] for pair in pairs):
        raise PlanError(f"not half-open ranges: {pairs}")
    return pairs
