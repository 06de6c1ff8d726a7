"""Runs drafted layers over pages as one program, a step at a time. Knows no recipe and no module.

Between layers nothing leaves the buffers: layer i reads side i modulo 2 and writes the other. Over several
ranks sums go through shared memory within the program; where the ranks have none, the program is cut there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

from shoal.attention.base import AttentionBatch, LayerPages
from shoal.attention.cpu import CpuPaged
from shoal.comm.base import Comm
from shoal.cpu_kernels import attention_arguments as at
from shoal.cpu_kernels.arguments import KernelError
from shoal.cpu_kernels.program import Operation, Program
from shoal.fuse.arena import Arena, Slot, Word
from shoal.fuse.build import FLOAT_BYTES, ROWS, SLOTS, Draft, LayerDraft
from shoal.fuse.recipe import INPUT, Attend
from shoal.jit.team import Job

__all__ = ["Buffers", "Stack", "Tables"]

Tables = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [T, width], in the order the layer takes

_FIRST_ROWS = 64


class Buffers:
    """Rows of values by name, float32, shared by stacks that do not run at once; they only grow."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.version = 0  # counts how often something has moved
        self._widths: dict[str, int] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def want(self, name: str, width: int) -> None:
        """Have a buffer of that name."""
        if self._widths.setdefault(name, width) != width:
            raise ValueError(f"{name} is {self._widths[name]} features wide, not {width}")

    def reserve(self, rows: int) -> None:
        """Make room for so many rows."""
        missing = self._widths.keys() - self._tensors.keys()
        if rows > self.num_rows:
            self.num_rows = max(rows, 2 * self.num_rows, _FIRST_ROWS)
            missing = set(self._widths)
        for name in missing:
            self._tensors[name] = torch.empty(self.num_rows, self._widths[name])
        self.version += bool(missing)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]


@dataclass(slots=True)
class _Layer:
    """What a step sets of one layer."""

    draft: LayerDraft
    call: Any  # words of its call of attention
    shape: tuple[Any, ...]  # what its call has in common with other layers'
    tables: tuple[int, int, int] = (0, 0, 0)  # addresses of cosines and sines, and bytes from row to row


@dataclass(frozen=True, slots=True)
class _Segment:
    """Operations up to something that is none: a sum over ranks of a value, or a module's call."""

    program: Program | None
    value: str = ""  # the buffer that is summed, or that the module's result goes to; empty: neither
    called: nn.Module | None = None
    source: str = ""  # the buffer that the module is given


class Stack:
    """Layers that run one after the other.

    Args:
        drafts: layers in order, each with the name of its output value.
        kernel: whose team computes, and who lays attention out.
        comm: the group of ranks.
        buffers: may be shared with other stacks.
    """

    def __init__(
        self, drafts: Sequence[tuple[LayerDraft, str]], kernel: CpuPaged, comm: Comm, buffers: Buffers
    ) -> None:
        self._kernel, self._comm, self._buffers = kernel, comm, buffers
        self._state = int(getattr(comm, "state_address", 0))
        self._version = 0
        self._pages: Mapping[int, LayerPages] = {}
        operations: list[Draft] = []
        rows: list[list[Word]] = []
        names: list[dict[str, str]] = []
        calls: list[int] = []
        for index, (draft, output) in enumerate(drafts):
            places = {name: _place(name, index, output, width) for name, width in draft.widths.items()}
            for name, width in draft.widths.items():
                buffers.want(places[name], width)
            for operation in draft.operations:
                if operation.job is None and operation.called is None and comm.size == 1:
                    continue
                if operation.is_attention and operation.words:
                    calls.append(len(rows))
                operations.append(operation)
                names.append(places)
                rows.append(self._words(operation, draft, places))
        self._arena = Arena(rows)
        self._layers = [
            _Layer(draft, self._arena.words(call), _shape(draft.attend))
            for (draft, _), call in zip(drafts, calls, strict=True)
        ]
        self._segments = list(self._cut(operations, names))
        self._input, self._output = (_side(index, drafts[0][0].widths[INPUT]) for index in (0, len(drafts)))

    def _words(self, operation: Draft, draft: LayerDraft, places: dict[str, str]) -> list[Word]:
        """An operation's words, with values called by their buffers."""
        if operation.called is not None:
            return []
        if operation.job is None:
            name = places[operation.value]
            return [Slot(ROWS), draft.widths[operation.value], Slot(("value", name)), self._state]
        return [
            Slot(("value", places[word.key[1]]), word.offset)
            if isinstance(word, Slot) and isinstance(word.key, tuple) and word.key[0] == "value"
            else word
            for word in operation.words
        ]

    def _cut(self, operations: Sequence[Draft], names: Sequence[Mapping[str, str]]) -> Sequence[_Segment]:
        """Programs, ended where something is not an operation."""
        found: list[_Segment] = []
        ready: list[Operation] = []
        call: Any = None
        for number, (draft, places) in enumerate(zip(operations, names, strict=True)):
            job = draft.job or (self._sum_job() if draft.called is None else None)
            if draft.is_attention and draft.words:
                call = self._arena.words(number)
            if job is None:
                program = Program(ready, self._kernel.team) if ready else None
                source = places.get(draft.source, "")
                found.append(_Segment(program, places[draft.value], draft.called, source))
                ready = []
            else:
                words = call if draft.is_attention else self._arena.words(number)
                ready.append(Operation(job, words, holds=draft.holds))
        if ready:
            found.append(_Segment(Program(ready, self._kernel.team)))
        return found

    def _sum_job(self) -> Job | None:
        if not self._state:
            return None
        from shoal.fuse.collective import sum_job

        return sum_job

    def use_pages(self, pages: Mapping[int, LayerPages]) -> None:
        """Keys and values by the layers' numbers; they are held on to."""
        self._pages = pages
        for layer in self._layers:
            number, own = layer.draft.number, pages[layer.draft.number]
            self._arena.set(("keys", number), own.keys.data_ptr())
            self._arena.set(("values", number), own.values.data_ptr())
            attend = layer.draft.attend
            heads = attend.heads, attend.query_heads // attend.heads
            self._kernel.describe_pages(layer.call, own, heads[1], attend.variant, layer.draft.sinks)
            self._arena.set("is_bfloat16", int(own.keys.dtype == torch.bfloat16))

    def run(
        self, hidden: torch.Tensor, batch: AttentionBatch, tables: Sequence[Tables | None]
    ) -> torch.Tensor:
        """The layers' output [T, W] float32, a view of a buffer that the next run writes.

        Args:
            hidden: [T, W] of any floating dtype.
            tables: for each layer its rotary tables, or None.
        """
        rows = len(hidden)
        self._buffers.reserve(rows)
        if self._version != self._buffers.version:
            self._version = self._buffers.version
            for key in self._arena.slots:
                if isinstance(key, tuple) and key[0] == "value":
                    self._arena.set(key, self._buffers[key[1]].data_ptr())
        self._buffers[self._input][:rows] = hidden
        slots = batch.slots.contiguous()
        self._arena.set(ROWS, rows)
        self._arena.set(SLOTS, slots.data_ptr())
        held = self._set_tables(tables)
        self._set_attention(batch)
        for segment in self._segments:
            if segment.program is not None:
                self._run(segment.program)
            if segment.called is not None:
                self._call(segment, rows, hidden.dtype)
            elif segment.value:
                part = self._buffers[segment.value][:rows]
                part.copy_(self._comm.all_reduce(part.clone()))  # ranks in threads read each other's tensors
        del held
        return self._buffers[self._output][:rows]

    def _call(self, segment: _Segment, rows: int, dtype: torch.dtype) -> None:
        assert segment.called is not None
        # A copy: some code adds to what it is given in place.
        made = segment.called(self._buffers[segment.source][None, :rows].to(dtype, copy=True))
        made = made[0] if isinstance(made, tuple) else made
        self._buffers[segment.value][:rows] = made.reshape(rows, -1)

    def _run(self, program: Program) -> None:
        try:
            program.run()
        except KernelError as error:
            if self._state:  # nothing else gives a status: a rank did not come
                from shoal.comm.shm import ShmComm

                assert isinstance(self._comm, ShmComm), "who has a state gives it its meaning"
                self._comm.check(error.status, "all_reduce")
            raise

    def _set_tables(self, tables: Sequence[Tables | None]) -> list[torch.Tensor]:
        """Returns what must live until the run is over."""
        ready: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # layers mostly share a pair
        for layer, own in zip(self._layers, tables, strict=True):
            if own is None:
                continue
            pair = ready.get(id(own))
            if pair is None:
                pair = ready[id(own)] = own[0].float().contiguous(), own[1].float().contiguous()
            rotary = layer.draft.attend.rotary
            cos, sin = reversed(pair) if rotary is not None and rotary.is_sine_first else pair
            place = cos.data_ptr(), sin.data_ptr(), FLOAT_BYTES * cos.stride(0)
            if place != layer.tables:
                layer.tables = place
                for name, value in zip(("cos", "sin", "table_bytes"), place, strict=True):
                    self._arena.set((name, layer.draft.number), value)
        return [table for pair in ready.values() for table in pair]

    def _set_attention(self, batch: AttentionBatch) -> None:
        fields: dict[tuple[Any, ...], Any] = {}
        for layer in self._layers:
            own = fields.get(layer.shape)
            if own is None:
                words = self._kernel.step_fields(batch, *layer.shape)
                own = fields[layer.shape] = numpy.array(words, numpy.int64)
            layer.call[at.SEQUENCES :] = own


def _shape(attend: Attend) -> tuple[Any, ...]:
    """The arguments of :meth:`shoal.attention.cpu.CpuPaged.step_fields`."""
    group = attend.query_heads // attend.heads
    return attend.heads, group, attend.variant, attend.key_width, attend.value_width


def _side(index: int, width: int) -> str:
    return f"side {index % 2} {width}"


def _place(name: str, index: int, output: str, width: int) -> str:
    """What a layer's value is called among all buffers."""
    if name == INPUT:
        return _side(index, width)
    return _side(index + 1, width) if name == output else f"{name} {width}"
