"""A recipe made into operations: which job, which words, in which order. Knows no tensor of a step.

Values live in buffers named by (layer-independent) keys; what a step brings is a slot of its own. A linear
whose result is only added to others writes onto what is there: the residual starts its sum. Over several
ranks one of them brings the residual, and one sum over ranks serves all linears of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shoal.cpu_kernels import attention_arguments as at
from shoal.cpu_kernels.activation import activation_number
from shoal.cpu_kernels.arguments import float_bits
from shoal.cpu_kernels.attention import attend_items, merge_items
from shoal.cpu_kernels.combine import MOST_TERMS, combine_job
from shoal.cpu_kernels.linear import linear_job
from shoal.cpu_kernels.mlp import gated_job
from shoal.cpu_kernels.norm import head_norm_job, norm_job
from shoal.cpu_kernels.rotary import rotary_job
from shoal.fuse.arena import Slot, Word
from shoal.fuse.recipe import (
    INPUT,
    Attend,
    Combine,
    Foreign,
    Gate,
    HeadNorm,
    LayerRecipe,
    Norm,
    Project,
    Step,
    reads,
)
from shoal.fuse.weights import Packer, norm_tensors
from shoal.jit.team import Job

__all__ = ["Draft", "LayerDraft", "draft_layer"]

ROWS, SLOTS, WINDOW_SLOTS = "rows", "slots", "window slots"
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Draft:
    """One operation: a job; or, with none, a sum over ranks of a value, or a call of a module."""

    job: Job | None
    words: Sequence[Word] = ()
    value: str = ""  # what is summed, or made by the module
    called: nn.Module | None = None
    source: str = ""  # what the module is given
    holds: tuple[object, ...] = ()
    is_attention: bool = False  # its words are a call of attention, filled in by whoever knows the pages


@dataclass(slots=True)
class LayerDraft:
    """A layer's operations, and the values they are over."""

    number: int
    attend: Attend
    operations: list[Draft] = field(default_factory=list)
    widths: dict[str, int] = field(default_factory=dict)  # value -> features
    sinks: torch.Tensor | None = None


def draft_layer(
    recipe: LayerRecipe, layer: nn.Module, number: int, packer: Packer, width: int, is_first_rank: bool
) -> LayerDraft:
    """The operations of a layer.

    Args:
        number: of the layer among those that keep keys and values; slots of its pages and tables carry it.
        packer: packs the weights.
        width: features of the layer's input.
        is_first_rank: whether this rank brings what is not summed over ranks to sums that are.
    """
    attend = next(step for step in recipe.steps if isinstance(step, Attend))
    builder = _Builder(recipe, layer, packer, is_first_rank, LayerDraft(number, attend))
    builder.draft.widths |= {INPUT: width, recipe.output: width}
    for step in recipe.steps:
        builder.add(step)
    if attend.sinks:
        builder.draft.sinks = layer.get_parameter(attend.sinks).detach().float().contiguous()
    return builder.draft


@dataclass(slots=True)
class _Builder:
    recipe: LayerRecipe
    layer: nn.Module
    packer: Packer
    is_first_rank: bool
    draft: LayerDraft
    onto: dict[str, Combine] = field(default_factory=dict)  # a linear's value -> the sum it is written onto
    begun: set[str] = field(default_factory=set)  # sums that have something written already

    def __post_init__(self) -> None:
        for step in self.recipe.steps:
            if isinstance(step, Combine):
                self.onto |= dict.fromkeys(self.absorbed(step), step)

    def absorbed(self, combine: Combine) -> list[str]:
        """Linears whose results are used in this sum alone, and can be written onto the rest of it."""
        steps = list(self.recipe.steps)
        position = {step.out: index for index, step in enumerate(steps)}
        readers = [name for step in steps for name in reads(step)]
        found: list[Project] = []
        for name, factor in combine.terms:
            step = steps[position[name]] if name in position else None
            if isinstance(step, Project) and factor == 1.0 and readers.count(name) == 1:
                found.append(step)
        if len({step.is_summed for step in found}) != 1:
            return []
        names = sorted((step.out for step in found), key=lambda name: position[name])
        rest = [name for name, _ in combine.terms if name not in names]
        is_ready = all(name == INPUT or position[name] < position[names[0]] for name in rest)
        return names if is_ready else []

    # -------------------------------------------------------------- words

    def rows(self, name: str, column: int = 0) -> tuple[Word, Word]:
        """Address of a value's first row from a column on, and bytes from row to row."""
        return Slot(("value", name), FLOAT_BYTES * column), FLOAT_BYTES * self.draft.widths[name]

    def emit(self, job: Job, *words: Word, holds: tuple[object, ...] = ()) -> None:
        self.draft.operations.append(Draft(job, (Slot(ROWS), *words), holds=holds))

    def sum_over_ranks(self, name: str) -> None:
        self.draft.operations.append(Draft(None, value=name))

    # -------------------------------------------------------------- steps

    def add(self, step: Step) -> None:
        adders: dict[type, Callable[..., None]] = {
            Norm: self.norm,
            Project: self.project,
            Gate: self.gate,
            Attend: self.attend,
            Combine: self.combine,
            Foreign: self.foreign,
        }
        adders[type(step)](step)

    def norm(self, step: Norm) -> None:
        width = self.draft.widths[step.source]
        self.draft.widths[step.out] = width
        weight, bias = norm_tensors(self.layer, step.module, step.adds_one)
        self.emit(
            norm_job, *self.rows(step.source), width, 0, 0, 0, 0, _address(weight), _address(bias),
            int(step.is_centred), float_bits(step.eps), *self.rows(step.out), holds=(weight, bias),
        )  # fmt: skip

    def project(self, step: Project) -> None:
        packed = self.packer.project(step)
        combine = self.onto.get(step.out)
        target = step.out
        residual: tuple[Word, Word] = 0, 0
        if combine is not None:
            target = combine.out
            self.draft.widths[target] = packed.columns
            residual = self.begin(combine, step)
        self.draft.widths[target] = packed.columns
        self.emit(
            linear_job, packed.address, *self.rows(step.source), activation_number(step.activation),
            *residual, *self.rows(target), holds=(packed,),
        )  # fmt: skip
        is_last = combine is None or step.out == self.absorbed(combine)[-1]
        if step.is_summed and is_last:
            self.sum_over_ranks(target)

    def begin(self, combine: Combine, step: Project) -> tuple[Word, Word]:
        """What a linear is added onto: the rest of the sum, or what is there already."""
        if combine.out in self.begun:
            return self.rows(combine.out)
        self.begun.add(combine.out)
        rest = [term for term in combine.terms if self.onto.get(term[0]) is not combine]
        if not rest or (step.is_summed and not self.is_first_rank):
            return 0, 0
        if len(rest) == 1 and rest[0][1] == 1.0:
            return self.rows(rest[0][0])
        self.combine_terms(combine.out, rest)
        return self.rows(combine.out)

    def gate(self, step: Gate) -> None:
        packed = self.packer.gate(step)
        width = len(step.gate.rows)
        self.draft.widths[step.out] = width
        self.emit(
            gated_job, packed.address, *self.rows(step.source), activation_number(step.activation), width,
            *self.rows(step.out), holds=(packed,),
        )  # fmt: skip

    def foreign(self, step: Foreign) -> None:
        self.draft.widths[step.out] = self.draft.widths[step.source]
        module = self.layer.get_submodule(step.module)
        self.draft.operations.append(Draft(None, value=step.out, called=module, source=step.source))

    def combine(self, step: Combine) -> None:
        if step.out not in self.begun:
            self.draft.widths[step.out] = self.draft.widths[step.terms[0][0]]
            self.combine_terms(step.out, step.terms)

    def combine_terms(self, out: str, terms: Sequence[tuple[str, float]]) -> None:
        words: list[Word] = [self.draft.widths[out], *self.rows(out), len(terms)]
        for name, factor in terms:
            words += (*self.rows(name), float_bits(factor))
        self.emit(combine_job, *words, *([0] * (3 * (MOST_TERMS - len(terms)))))

    def attend(self, step: Attend) -> None:
        queries, keys = step.query_heads * step.key_width, step.heads * step.key_width
        self.draft.widths[step.out] = step.query_heads * step.value_width
        if step.query_norm is not None:
            self.head_norm(step.query_norm, step.source, 0, queries)
        if step.key_norm is not None:
            self.head_norm(step.key_norm, step.source, queries, keys)
        number, rotary = self.draft.number, step.rotary
        tables: tuple[Word, ...] = (0, 0, 0, 0, 0, 0)
        if rotary is not None:
            tables = (
                Slot(("cos", number)), Slot(("sin", number)), Slot(("table_bytes", number)),
                rotary.table_step, rotary.width, int(rotary.is_interleaved),
            )  # fmt: skip
        slots = SLOTS if step.variant.window is None else WINDOW_SLOTS
        self.emit(
            rotary_job, *self.rows(step.source), step.query_heads, *self.rows(step.source, queries),
            step.heads, *self.rows(step.source, queries + keys), step.key_width, step.value_width, *tables,
            Slot(slots), Slot(("keys", number)), Slot(("values", number)), Slot("is_bfloat16"),
        )  # fmt: skip
        call: list[Word] = [0] * at.CALL_LENGTH
        call[at.QUERY], call[at.QUERY_TOKEN_STRIDE] = self.rows(step.source)
        call[at.QUERY_HEAD_STRIDE] = FLOAT_BYTES * step.key_width
        call[at.OUT], call[at.OUT_TOKEN_STRIDE] = self.rows(step.out)
        call[at.OUT_HEAD_STRIDE] = FLOAT_BYTES * step.value_width
        self.draft.operations.append(Draft(attend_items, call, is_attention=True))
        self.draft.operations.append(Draft(merge_items, (), is_attention=True))

    def head_norm(self, norm: HeadNorm, source: str, column: int, features: int) -> None:
        weight, bias = norm_tensors(self.layer, norm.module, norm.adds_one)
        self.emit(
            head_norm_job, *self.rows(source, column), features // norm.width, norm.width, _address(weight),
            _address(bias), int(norm.is_centred), float_bits(norm.eps), holds=(weight, bias),
        )  # fmt: skip


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
