"""Paged attention on a CPU by our own kernels: fp32 and bf16 pages, fp32 arithmetic, a team of threads.

Knows tensors and what a kernel is told, not how it computes. Importing this module imports numba. A row's
result depends on its own sequence alone, bit by bit: not on the batch, on how a prompt was cut into chunks,
or on the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.attention.base import AttentionBatch, LayerPages, Variant
from shoal.cpu_kernels import attention_arguments as at
from shoal.cpu_kernels.attention import attend, write_pages
from shoal.cpu_kernels.attention_plan import ITEMS_PER_THREAD, plan_items
from shoal.jit.team import Team, aligned_zeros

__all__ = ["CpuPaged"]

_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_LINE_BYTES = 64
_FLOAT_BYTES = 4
_MOST_LANES = 16  # a record and a tile of keys are laid out for the widest vectors there are
_ALL = 1 << 40  # positions, more than any sequence has
_WRITE_ALONE_BYTES = 1 << 16  # a copy of less is done before another thread has woken up


@dataclass(slots=True)
class _Work:
    """A step's items, kept for its other layers. ``batch`` keeps the block tables alive."""

    batch: AttentionBatch
    sequences: Any
    items: Any
    bounds: Any
    merges: Any
    num_records: int
    fields: tuple[int, ...]  # SEQUENCES .. NUM_MERGES of a call


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a thread's scratch and a record look like for heads of some widths."""

    record_bytes: int
    scratch_bytes: int
    offsets: tuple[int, ...]  # QUERY_ROWS .. PARTIAL of a call


class CpuPaged:
    """A :class:`shoal.attention.base.PagedKernel` that also writes the pages. For one caller at a time.

    Args:
        team: the threads that share the work.
    """

    def __init__(self, team: Team) -> None:
        self.team = team
        self._call = _Memory(8 * at.CALL_LENGTH)
        self._fields = self._call.bytes.view(np.int64)
        self._write_call = _Memory(8 * at.WRITE_LENGTH)
        self._write_fields = self._write_call.bytes.view(np.int64)
        self._scratch, self._partials = _Memory(_LINE_BYTES), _Memory(_LINE_BYTES)
        self._work: dict[tuple[int, int, int, int], _Work] = {}
        self._layouts: dict[tuple[int, int], _Layout] = {}

    def write(self, pages: LayerPages, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Put keys [T, H, Ek] and values [T, H, Ev] into ``slots`` [T] int64, converted to the pages' dtype.

        Raises:
            ValueError: a dtype other than float32 and bfloat16.
        """
        keys, values, slots = _rows_together(keys), _rows_together(values), slots.contiguous()
        kind, page_kind = _kind(keys.dtype), _kind(pages.keys.dtype)
        self._write_fields[:] = (
            *_place(keys), *_page_place(pages.keys), keys.shape[2],
            *_place(values), *_page_place(pages.values), values.shape[2],
            kind, page_kind, keys.shape[1], slots.data_ptr(), keys.shape[0],
        )  # fmt: skip
        if keys.nbytes + values.nbytes <= _WRITE_ALONE_BYTES:
            write_pages(0, 1, self._write_call.address)
        else:
            self.team.run(write_pages, self._write_call.address)

    def __call__(
        self,
        query: torch.Tensor,
        pages: LayerPages,
        batch: AttentionBatch,
        variant: Variant,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :class:`shoal.attention.base.PagedKernel`.

        Args:
            slopes: [Hq], ALiBi: a head's slope times (key's position - query's position) joins the score.

        Raises:
            ValueError: a dtype other than float32 and bfloat16.
        """
        query = _rows_together(query)
        out = query.new_empty(query.shape[0], query.shape[1], pages.values.shape[-1])
        sinks, slopes = _float32(sinks), _float32(slopes)
        self.describe(self._fields, query, out, pages, batch, variant, sinks, slopes)
        status = self.team.run(attend, self._call.address)
        assert status == 0, f"attention's threads did not meet: {status}"
        return out

    def describe(
        self,
        fields: Any,
        query: torch.Tensor,
        out: torch.Tensor,
        pages: LayerPages,
        batch: AttentionBatch,
        variant: Variant,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None,
    ) -> None:
        """Write down a call, for :func:`shoal.cpu_kernels.attention.attend` or a kernel that does more.

        It holds for this step; what it points at must live as long.

        Args:
            fields: int64 [CALL_LENGTH], written.
            query, out: [T, Hq, Ek] and [T, Hq, Ev], a head's numbers side by side.
            sinks, slopes: float32, contiguous, or None.

        Raises:
            ValueError: a dtype other than float32 and bfloat16.
        """
        heads, key_width = pages.keys.shape[2:]
        group = query.shape[1] // heads
        fields[: at.KEYS] = (*_place(query), _kind(query.dtype))
        fields[at.OUT : at.HEADS] = (*_place(out), _kind(out.dtype))
        self.describe_pages(fields, pages, group, variant, sinks, slopes)
        fields[at.SEQUENCES :] = self.step_fields(
            batch, heads, group, variant, key_width, pages.values.shape[-1]
        )

    def describe_pages(
        self,
        fields: Any,
        pages: LayerPages,
        group: int,
        variant: Variant,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None = None,
    ) -> None:
        """Write down of a call what stays from step to step, but for queries and results.

        Args:
            fields: int64 [CALL_LENGTH], written.
            group: query heads that read one KV head.
            sinks, slopes: float32, contiguous, or None; they must live as long as the call.

        Raises:
            ValueError: a dtype other than float32 and bfloat16.
        """
        _, block_size, heads, key_width = pages.keys.shape
        places = *_page_place(pages.keys), *_page_place(pages.values)
        fields[at.KEYS : at.OUT] = (*places, _kind(pages.keys.dtype))
        fields[at.HEADS : at.SCALE] = (heads, group, key_width, pages.values.shape[-1], block_size)
        fields[at.SCALE : at.SEQUENCES] = (
            _bits(variant.scale), _bits(variant.softcap or 0.0), _window(variant),
            0 if sinks is None else sinks.data_ptr(), 0 if slopes is None else slopes.data_ptr(),
        )  # fmt: skip

    def step_fields(
        self,
        batch: AttentionBatch,
        heads: int,
        group: int,
        variant: Variant,
        key_width: int,
        value_width: int,
    ) -> tuple[int, ...]:
        """What of a call differs from step to step, SEQUENCES to its end; it holds for this step.

        Args:
            heads: KV heads.
            group: query heads that read one of them.
        """
        together = at.TOGETHER_BYTES // (_FLOAT_BYTES * at.KEY_BLOCK * (key_width + value_width))
        work = self._work_of(batch, heads, group, _window(variant), together)
        return (*work.fields, *self._memory_fields(key_width, value_width, work.num_records))

    def _memory_fields(self, key_width: int, value_width: int, num_records: int) -> tuple[int, ...]:
        """PARTIALS and what follows it in a call; the memory only grows, and what was given out stays."""
        layout = self._layouts.get((key_width, value_width))
        if layout is None:
            layout = self._layouts[key_width, value_width] = _layout(key_width, value_width)
        self._partials = self._partials.grown(num_records * layout.record_bytes)
        self._scratch = self._scratch.grown(self.team.num_threads * layout.scratch_bytes)
        return (
            self._partials.address, self._scratch.address, layout.scratch_bytes, layout.record_bytes,
            self.team.barrier_address, self.team.spin_ns, *layout.offsets,
        )  # fmt: skip

    def _work_of(self, batch: AttentionBatch, heads: int, group: int, window: int, together: int) -> _Work:
        key = (heads, group, window, together)
        work = self._work.get(key)
        if work is not None and work.batch is batch:
            return work
        sequences, threads = _sequences(batch), self.team.num_threads
        tiles = int((-(-sequences[:, at.NUM_TOKENS] * group // at.TILE_ROWS)).sum()) * heads
        items = _rows(None if work is None else work.items, tiles + 2 * ITEMS_PER_THREAD * (threads + heads))
        merges = _rows(None if work is None else work.merges, tiles)
        bounds = np.zeros(threads + 2, np.int64)
        addresses = items.ctypes.data, bounds.ctypes.data, merges.ctypes.data
        start, count = sequences.ctypes.data, len(sequences)
        records = int(plan_items(start, count, heads, group, window, together, threads, *addresses))
        fields = (start, count, *addresses, int(bounds[threads + 1]))
        work = self._work[key] = _Work(batch, sequences, items, bounds, merges, records, fields)
        return work


class _Memory:
    """Zeroed bytes from a cache line on, and their address."""

    def __init__(self, num_bytes: int, smaller: _Memory | None = None) -> None:
        self.bytes = aligned_zeros(num_bytes)
        self._smaller = smaller  # calls of the same step may point there
        self.address = int(self.bytes.ctypes.data)

    def grown(self, num_bytes: int) -> _Memory:
        """Itself if it is large enough, else other memory, at least twice as large."""
        have = len(self.bytes)
        return self if have >= num_bytes else _Memory(max(num_bytes, 2 * have), self)


def _layout(key_width: int, value_width: int) -> _Layout:
    record = 4 * (-(-value_width // _MOST_LANES) * _MOST_LANES + _MOST_LANES)
    sizes = (
        4 * at.TILE_ROWS * key_width,  # queries
        4 * key_width * 2 * _MOST_LANES,  # keys in columns
        4 * at.TILE_ROWS * at.KEY_BLOCK,  # weights
        8 * 2 * at.KEY_BLOCK,  # slots of a block's keys, and of the next one's
        record * at.TILE_ROWS,  # what a tile has so far
        record * at.TILE_ROWS,  # and one block's part
    )
    ends = np.cumsum([-(-size // _LINE_BYTES) * _LINE_BYTES for size in sizes]).tolist()
    return _Layout(record, ends[-1], (0, *ends[:-1]))


def _sequences(batch: AttentionBatch) -> Any:
    """int64 [sequences, SEQUENCE_LENGTH], as the kernels want it."""
    size = 0 if batch.decode is None else batch.decode.size
    rows = np.empty((size + len(batch.prefills), at.SEQUENCE_LENGTH), np.int64)
    if batch.decode is not None:
        table = batch.decode.block_table
        assert table.stride(1) == 1 or table.shape[1] == 1, "block ids lie side by side"
        rows[:size, at.FIRST_TOKEN] = np.arange(size)
        rows[:size, at.NUM_TOKENS] = 1
        rows[:size, at.LENGTH] = batch.decode.lengths.numpy()
        rows[:size, at.TABLE] = table.data_ptr() + np.arange(size) * (table.stride(0) * table.element_size())
    for index, prefill in enumerate(batch.prefills, size):
        tokens, table = prefill.stop - prefill.start, prefill.block_ids
        assert table.stride(0) == 1 or len(table) == 1, "block ids lie side by side"
        rows[index] = (prefill.start, tokens, prefill.length, table.data_ptr())
    return rows


def _rows(kept: Any, room: int) -> Any:
    """Room for items: what was kept, or twice what is needed."""
    if kept is not None and len(kept) >= room:
        return kept
    return np.zeros((2 * room, at.ITEM_LENGTH), np.int64)


def _rows_together(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if a head's numbers do not lie side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _float32(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().float().contiguous()


def _kind(dtype: torch.dtype) -> int:
    kind = _KINDS.get(dtype)
    if kind is None:
        raise ValueError(f"cpu_paged computes on float32 and bfloat16, not on {dtype}")
    return kind


def _place(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Address and byte strides of the tokens and heads of [T, H, E]."""
    item, (token, head, _) = tensor.element_size(), tensor.stride()
    return tensor.data_ptr(), token * item, head * item


def _page_place(pool: torch.Tensor) -> tuple[int, int, int]:
    """Address and byte strides of the slots and heads of [N, S, H, E]."""
    item, (_, slot, head, _) = pool.element_size(), pool.stride()
    return pool.data_ptr(), slot * item, head * item


def _window(variant: Variant) -> int:
    """The word WINDOW of a call."""
    if variant.is_causal:
        return variant.window or 0
    return -(variant.window or _ALL)


def _bits(value: float) -> int:
    """A float32 as the int64 whose lower half holds its bits."""
    bits: int = np.float32(value).view(np.uint32).item()
    return bits
