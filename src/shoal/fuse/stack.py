"""Runs drafted layers over pages as one program, a step at a time. Knows no recipe and no module.

Between layers nothing leaves the buffers: layer i reads side i modulo 2 and writes the other. Over several
ranks sums go through shared memory within the program; where the ranks have none, the program is cut there.

Ranks may have different shares of a layer's attention and of its MLP, even where they have equal shares of
the whole: at each sum one of them would wait. A step of many rows then goes through the layers in two halves,
in turn: while the sum of one is under way, the other is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shoal.attention.base import AttentionBatch, LayerPages
from shoal.attention.cpu import CpuPaged
from shoal.comm.base import Comm
from shoal.cpu_kernels.arguments import KernelError
from shoal.cpu_kernels.layout import PackedWeight
from shoal.cpu_kernels.program import Operation, Program
from shoal.fuse.arena import Slot, Word
from shoal.fuse.buffers import Buffers
from shoal.fuse.build import FLOAT_BYTES, ROWS, Draft, LayerDraft
from shoal.fuse.halves import choose_cut, cut_batch
from shoal.fuse.lane import CHANNEL, VALUE, Lane
from shoal.fuse.recipe import INPUT
from shoal.fuse.tables import KeptTables, Tables
from shoal.jit.team import Job

__all__ = ["Stack"]

# The second half reads all weights again. That takes as long as to compute with them for two to eight rows,
# measured with weights that no cache holds: where ranks had nothing to wait for, halves lost 8% of a step of
# 24 rows, 6% of one of 32, 4% of one of 48.
_REREADING_ROWS = 4


@dataclass(frozen=True, slots=True)
class _Segment:
    """Operations up to something that is none: a sum over ranks of a value, or a module's call."""

    program: Program | None
    value: str = ""  # the buffer that is summed, or that the module's result goes to; empty: neither
    called: nn.Module | None = None
    source: str = ""  # the buffer that the module is given


@dataclass(frozen=True, slots=True)
class _Part:
    """An operation of the stack."""

    draft: Draft
    places: Mapping[str, str]  # its layer's values -> buffers
    row: int  # of a lane's words
    sum_width: int = 0  # features of what is summed; 0: it is no sum


class Stack:
    """Layers that run one after the other.

    Args:
        drafts: layers in order, each with the name of its output value.
        kernel: whose team computes, and who lays attention out.
        comm: the group of ranks, which make their stacks together.
        buffers: may be shared with other stacks.
    """

    def __init__(
        self, drafts: Sequence[tuple[LayerDraft, str]], kernel: CpuPaged, comm: Comm, buffers: Buffers
    ) -> None:
        self._team, self._comm, self._buffers = kernel.team, comm, buffers
        self._state = int(getattr(comm, "state_address", 0))
        self._pages: Mapping[int, LayerPages] = {}
        self._tables = KeptTables()
        self._parts: list[_Part] = []
        words: list[list[Word]] = []
        layers: list[tuple[LayerDraft, int]] = []
        for index, (draft, output) in enumerate(drafts):
            places = {name: _place(name, index, output, width) for name, width in draft.widths.items()}
            for name, width in draft.widths.items():
                buffers.want(places[name], width)
            for operation in draft.operations:
                if operation.job is None and operation.called is None and comm.size == 1:
                    continue
                if operation.is_attention and operation.words:
                    layers.append((draft, len(words)))
                row = layers[-1][1] if operation.is_attention else len(words)
                is_sum = operation.job is None and operation.called is None
                sum_width = draft.widths[operation.value] if is_sum else 0
                self._parts.append(_Part(operation, places, row, sum_width))
                words.append(self._words(operation, draft, places))
        self._width = drafts[0][0].widths[INPUT]
        self._input, self._output = (_side(index, self._width) for index in (0, len(drafts)))
        self._lanes = [Lane(0, words, layers, buffers, kernel)]
        self._segments = list(self._cut())
        self._halves: Program | None = None
        self._saved = self._saved_by_halves()
        if self._saved > 0:
            self._lanes.append(Lane(1, words, layers, buffers, CpuPaged(kernel.team)))
            self._halves = self._interleaved()

    def _words(self, operation: Draft, draft: LayerDraft, places: dict[str, str]) -> list[Word]:
        """An operation's words, with values called by their buffers."""
        if operation.called is not None:
            return []
        if operation.job is None:
            name = places[operation.value]
            return [
                Slot(ROWS),
                draft.widths[operation.value],
                Slot((VALUE, name)),
                self._state,
                Slot(CHANNEL),
            ]
        return [
            Slot((VALUE, places[word.key[1]]), word.offset)
            if isinstance(word, Slot) and isinstance(word.key, tuple) and word.key[0] == VALUE
            else word
            for word in operation.words
        ]

    def _cut(self) -> Sequence[_Segment]:
        """Programs of all rows together, ended where something is not an operation."""
        found: list[_Segment] = []
        ready: list[Operation] = []
        for part in self._parts:
            draft, places = part.draft, part.places
            job = draft.job or (self._sum_job() if draft.called is None else None)
            if job is None:
                program = Program(ready, self._team) if ready else None
                source = places.get(draft.source, "")
                found.append(_Segment(program, places[draft.value], draft.called, source))
                ready = []
            else:
                ready.append(Operation(job, self._lanes[0].words(part.row), holds=draft.holds))
        if ready:
            found.append(_Segment(Program(ready, self._team)))
        return found

    def _sum_job(self) -> Job | None:
        if not self._state:
            return None
        from shoal.fuse.collective import sum_job

        return sum_job

    def _saved_by_halves(self) -> float:
        """The part of a step's time that ranks wait for each other at sums, by the sizes of their weights."""
        if not self._state or len(self._segments) > 1:
            return 0.0
        mine = [0]  # elements that are multiplied by, from sum to sum
        for part in self._parts:
            mine[-1] += sum(h.columns * h.depth for h in part.draft.holds if isinstance(h, PackedWeight))
            if part.sum_width:
                mine.append(0)
        everyone = self._comm.all_gather(torch.tensor([mine]), [1] * self._comm.size, 0)
        return 1 - float(everyone.sum(1).max() / everyone.amax(0).sum())

    def _interleaved(self) -> Program:
        """All operations of two lanes, in turn from sum to sum."""
        from shoal.fuse.collective import collect_job, post_job

        ready: list[Operation] = []
        under_way: _Part | None = None  # the sum that each lane has posted
        parts: list[_Part] = []
        for last in (*self._parts, None):
            if last is not None and not last.sum_width:
                parts.append(last)
                continue
            for lane in self._lanes:
                if under_way is not None:
                    ready.append(Operation(collect_job, lane.words(under_way.row)))
                for part in parts:
                    assert part.draft.job is not None, "nothing but sums has no job here"
                    ready.append(Operation(part.draft.job, lane.words(part.row), holds=part.draft.holds))
                if last is not None:  # the other threads may go on to the other lane
                    ready.append(Operation(post_job, lane.words(last.row), is_followed_by_meeting=False))
            under_way, parts = last, []
        return Program(ready, self._team)

    def use_pages(self, pages: Mapping[int, LayerPages]) -> None:
        """Keys and values by the layers' numbers; they are held on to."""
        self._pages = pages
        for lane in self._lanes:
            lane.use_pages(pages)

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
        self._buffers[self._input][:rows] = hidden
        ready = self._tables.keep(tables)
        cut = self._choose_cut(batch, rows)
        if cut:
            assert self._halves is not None
            for lane, first, half in zip(self._lanes, (0, cut), cut_batch(batch, cut), strict=True):
                lane.set(first, half, ready)
            self._run(self._halves)
            return self._buffers[self._output][:rows]
        self._lanes[0].set(0, batch, ready)
        for segment in self._segments:
            if segment.program is not None:
                self._run(segment.program)
            if segment.called is not None:
                self._call(segment, rows, hidden.dtype)
            elif segment.value:
                part = self._buffers[segment.value][:rows]
                part.copy_(self._comm.all_reduce(part.clone()))  # ranks in threads read each other's tensors
        return self._buffers[self._output][:rows]

    def _choose_cut(self, batch: AttentionBatch, rows: int) -> int:
        """Where the second half begins; 0: the rows go together."""
        if self._saved * rows < _REREADING_ROWS:
            return 0
        cut = choose_cut(batch, self._width)
        smaller, larger = sorted((cut, rows - cut))
        widest = max(part.sum_width for part in self._parts)
        fits = larger * widest * FLOAT_BYTES <= int(getattr(self._comm, "slot_bytes", 0))
        return cut if fits and self._saved * 2 * smaller >= _REREADING_ROWS else 0

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


def _side(index: int, width: int) -> str:
    return f"side {index % 2} {width}"


def _place(name: str, index: int, output: str, width: int) -> str:
    """What a layer's value is called among all buffers."""
    if name == INPUT:
        return _side(index, width)
    return _side(index + 1, width) if name == output else f"{name} {width}"
