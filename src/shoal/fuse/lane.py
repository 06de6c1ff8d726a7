"""Rows of a step on their way through a stack: the words of all its operations, set for these rows. Knows no
program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from shoal.attention.base import AttentionBatch, LayerPages
from shoal.attention.cpu import CpuPaged
from shoal.cpu_kernels import attention_arguments as at
from shoal.fuse.arena import Arena, Word
from shoal.fuse.buffers import Buffers
from shoal.fuse.build import FLOAT_BYTES, ROWS, SLOTS, WINDOW_SLOTS, LayerDraft
from shoal.fuse.recipe import Attend
from shoal.fuse.tables import Tables

__all__ = ["CHANNEL", "VALUE", "Lane"]

CHANNEL, VALUE = "channel", "value"  # slots: the lane's number; with a buffer's name, where its rows begin


@dataclass(slots=True)
class _Layer:
    """What a step sets of one layer."""

    draft: LayerDraft
    call: NDArray[numpy.int64]  # words of its call of attention
    shape: tuple[Any, ...]  # what its call has in common with other layers'


class Lane:
    """One set of all words.

    Args:
        number: of the lane in its stack.
        words: of each operation of the stack.
        layers: of the stack, each with the number of the operation that is its call of attention.
        buffers: hold the values of all lanes, each lane's rows one after the other.
        kernel: lays out the attention of this lane alone.
    """

    def __init__(
        self,
        number: int,
        words: Sequence[Sequence[Word]],
        layers: Sequence[tuple[LayerDraft, int]],
        buffers: Buffers,
        kernel: CpuPaged,
    ) -> None:
        self._arena = Arena(words)
        self._arena.set(CHANNEL, number)
        self._layers = [
            _Layer(draft, self._arena.words(call), _shape(draft.attend)) for draft, call in layers
        ]
        self._buffers, self._kernel = buffers, kernel
        self._values = [key for key in self._arena.slots if isinstance(key, tuple) and key[0] == VALUE]
        self._place = 0, 0  # which buffers, and which of their rows, the words are about
        self._held: tuple[object, ...] = ()  # what the words are addresses of
        self._tables: tuple[Sequence[Tables | None], int] = (), 0  # and which of their rows come first

    def words(self, number: int) -> NDArray[numpy.int64]:
        """The words of operation ``number``."""
        return self._arena.words(number)

    def use_pages(self, pages: Mapping[int, LayerPages]) -> None:
        """Keys and values by the layers' numbers; the caller holds on to them."""
        for layer in self._layers:
            number, own = layer.draft.number, pages[layer.draft.number]
            self._arena.set(("keys", number), own.keys.data_ptr())
            self._arena.set(("values", number), own.values.data_ptr())
            attend = layer.draft.attend
            group = attend.query_heads // attend.heads
            self._kernel.describe_pages(layer.call, own, group, attend.variant, layer.draft.sinks)
            self._arena.set("is_bfloat16", int(own.keys.dtype == torch.bfloat16))

    def set(self, first: int, batch: AttentionBatch, tables: Sequence[Tables | None]) -> None:
        """Set all words for the rows of a batch; it and the tables are held until the next time.

        Args:
            first: the row of the buffers, and of the tables, that the batch begins at.
            tables: of each layer, float32, contiguous; a list that was given before holds what it held.
        """
        slots = batch.slots.contiguous()
        window_slots = slots if batch.windowed is None else batch.windowed.slots.contiguous()
        self._held = slots, window_slots, batch
        place = self._buffers.version, first
        if self._place != place:
            self._place = place
            for key in self._values:
                self._arena.set(key, self._buffers[key[1]][first:].data_ptr())
        self._arena.set(ROWS, len(slots))
        self._arena.set(SLOTS, slots.data_ptr())
        self._arena.set(WINDOW_SLOTS, window_slots.data_ptr())
        if tables is not self._tables[0] or first != self._tables[1]:
            self._tables = tables, first
            for layer, own in zip(self._layers, tables, strict=True):
                if own is not None:
                    self._set_tables(layer, own, first)
        self._set_attention(batch)

    def _set_tables(self, layer: _Layer, tables: Tables, first: int) -> None:
        rotary = layer.draft.attend.rotary
        cos, sin = reversed(tables) if rotary is not None and rotary.is_sine_first else tables
        row_bytes = FLOAT_BYTES * cos.stride(0)
        place = cos.data_ptr() + first * row_bytes, sin.data_ptr() + first * row_bytes, row_bytes
        for name, value in zip(("cos", "sin", "table_bytes"), place, strict=True):
            self._arena.set((name, layer.draft.number), value)

    def _set_attention(self, batch: AttentionBatch) -> None:
        fields: dict[tuple[Any, ...], NDArray[numpy.int64]] = {}
        for layer in self._layers:
            own = fields.get(layer.shape)
            if own is None:
                own_batch = batch.of(layer.draft.attend.variant.window)
                words = self._kernel.step_fields(own_batch, *layer.shape)
                own = fields[layer.shape] = numpy.array(words, numpy.int64)
            layer.call[at.SEQUENCES :] = own


def _shape(attend: Attend) -> tuple[Any, ...]:
    """The arguments of :meth:`shoal.attention.cpu.CpuPaged.step_fields`."""
    group = attend.query_heads // attend.heads
    return attend.heads, group, attend.variant, attend.key_width, attend.value_width
