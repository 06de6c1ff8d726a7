"""Decoders over KV pages, in two ways. ``paged``: attention goes through transformers' registry and lands
in our kernel, the batch is one ragged row. ``padded``: the layers' own attention code runs on dense K and V
that a cache of ours gathers. Knows no scheduler; which way a model goes is decided in :mod:`.choose`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from shoal.attention.base import AttentionBatch, DecodeGroup, KVShape, LayerPages, PagedKernel, Prefill
from shoal.attention.dense_cache import PaddedBatch, dense_cache, measuring_cache
from shoal.attention.hook import AttentionContext, attach
from shoal.model.base import Ragged, Row, ServedModel
from shoal.model.build import vocabulary_size

__all__ = ["Caller", "LeftPadded", "PaddedCausal", "PagedCausal", "attention_batch", "left_padded"]


class Caller:
    """Calls a transformers causal model whatever its version calls its arguments."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module
        self.vocabulary = vocabulary_size(module.config)
        names = set(inspect.signature(module.forward).parameters)
        self.cache_name = next((n for n in ("cache", "past_key_values") if n in names), None)
        self._takes_positions = "position_ids" in names
        self._takes_keep = "logits_to_keep" in names

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None, **extra: Any
    ) -> torch.Tensor:
        """The logits alone; see :meth:`output`."""
        return self.output(ids, positions, wanted, **extra)[0]

    def output(
        self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None, **extra: Any
    ) -> tuple[torch.Tensor, Any]:
        """Logits at columns ``wanted`` (None: the last one), and all that the model gives.

        Args:
            ids: [B, T] int64.
            positions: [B, T] int64; left out where the model has no such argument.
            wanted: [R] int64 columns.

        Returns:
            [B, R, V], and the output they come from.
        """
        if self._takes_positions:
            extra["position_ids"] = positions
        if self._takes_keep:
            extra["logits_to_keep"] = 1 if wanted is None else wanted
        output = self.module(input_ids=ids, return_dict=True, **extra)
        logits: torch.Tensor = output.logits
        if not self._takes_keep:
            logits = logits[:, -1:] if wanted is None else logits[:, wanted]
        return logits, output


def attention_batch(batch: Ragged) -> AttentionBatch:
    """The batch as a paged kernel wants it."""
    if batch.attention is not None:
        return batch.attention
    singles = sum(row.count == 1 for row in batch.rows)
    decode = None
    if singles:
        rows = batch.rows[:singles]
        width = max(len(row.block_ids) for row in rows)
        table = torch.zeros(singles, width, dtype=torch.int64, device=batch.ids.device)
        for index, row in enumerate(rows):
            table[index, : len(row.block_ids)] = row.block_ids
        lengths = torch.tensor([row.length for row in rows], device=batch.ids.device)
        decode = DecodeGroup(table, lengths)
    prefills = [
        Prefill(row.first, row.first + row.count, row.block_ids, row.length) for row in batch.rows[singles:]
    ]
    return AttentionBatch(batch.slots, decode, prefills)


class LeftPadded(NamedTuple):
    """Rows that bring equally many tokens, made one batch: B rows, Q new columns each, L columns in all."""

    tokens: torch.Tensor  # [B, Q] int64: their tokens of the ragged batch
    mask: torch.Tensor  # [B, L] int64: 0 where a column is padding
    kept: PaddedBatch


def left_padded(batch: Ragged, rows: Sequence[Row]) -> LeftPadded:
    """The rows with their newest tokens in the last columns."""
    new, length = rows[0].count, max(row.length for row in rows)
    device = batch.ids.device
    mask = torch.zeros(len(rows), length, dtype=torch.int64, device=device)
    past = torch.zeros(len(rows), length - new, dtype=torch.int64, device=device)
    tokens = torch.stack([torch.arange(r.first, r.first + r.count, device=device) for r in rows])
    offsets = torch.arange(batch.block_size, device=device)
    for index, row in enumerate(rows):
        mask[index, length - row.length :] = 1
        if row.start:
            slots = (row.block_ids[:, None] * batch.block_size + offsets).flatten()
            past[index, -row.start :] = slots[: row.start]
    return LeftPadded(tokens, mask, PaddedBatch(new, batch.slots[tokens.flatten()], past, length))


class PagedCausal:
    """A decoder whose attention is ours."""

    way = "paged"
    keeps_kv = True

    def __init__(self, module: PreTrainedModel, kernel: PagedKernel) -> None:
        self._call = Caller(module)
        self.context = AttentionContext(kernel)
        attach(module, self.context)

    @classmethod
    def of(cls, module: PreTrainedModel, kernel: PagedKernel) -> ServedModel:
        """The module served this way, untested."""
        return cls(module, kernel)

    @property
    def kv_shapes(self) -> Sequence[KVShape]:
        """Known once :meth:`plain` has run."""
        return self.context.shapes

    def use_pages(self, pages: list[LayerPages]) -> None:
        self.context.pages = pages

    def plain(self, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        self.context.batch = None
        positions = torch.arange(len(ids), device=ids.device)
        return self._call(ids[None], positions[None], wanted, use_cache=False)[0]

    def logits(self, batch: Ragged) -> torch.Tensor:
        self.context.batch = attention_batch(batch)
        return self._call(batch.ids[None], batch.positions[None], batch.wanted, use_cache=False)[0]


class PaddedCausal:
    """A decoder with attention code of its own and a ``Cache`` argument.

    Sequences with one token go together as one left-padded batch; each longer one goes alone. Where a model
    counts positions by the columns before them, which padding moves, only those of equal length go together.
    """

    way = "padded"
    keeps_kv = True

    def __init__(self, module: PreTrainedModel) -> None:
        self._call = Caller(module)
        self._pads = True
        self._num_layers: int = getattr(module.config, "num_hidden_layers", 0)
        self._shapes: list[KVShape] = []
        self._pages: list[LayerPages] = []

    @classmethod
    def of(cls, module: PreTrainedModel, kernel: PagedKernel) -> ServedModel:
        """The module served this way, untested; it brings its own kernel."""
        return cls(module)

    @property
    def notes(self) -> tuple[str, ...]:
        """What goes into one batch."""
        return (
            ()
            if self._pads
            else ("only sequences of equal length decode together: its code counts columns, not positions",)
        )

    def be_more_careful(self) -> bool:
        """See :class:`shoal.model.base.Careful`."""
        was_padding, self._pads = self._pads, False
        return was_padding

    @property
    def kv_shapes(self) -> Sequence[KVShape]:
        """Known once :meth:`plain` has run."""
        return self._shapes

    def use_pages(self, pages: list[LayerPages]) -> None:
        self._pages = pages

    def plain(self, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        cache, noted = measuring_cache(self._num_layers)
        positions = torch.arange(len(ids), device=ids.device)
        logits = self._call(ids[None], positions[None], wanted, **self._cached(cache))[0]
        self._shapes = [shape for layer in noted for shape in layer]
        return logits

    def logits(self, batch: Ragged) -> torch.Tensor:
        singles = sum(row.count == 1 for row in batch.rows)
        together: dict[int, list[Row]] = {}
        for row in batch.rows[:singles]:
            together.setdefault(0 if self._pads else row.length, []).append(row)
        groups = [*together.values(), *([row] for row in batch.rows[singles:])]
        wanted = batch.wanted.tolist()
        logits_of: dict[int, torch.Tensor] = {}
        for rows in groups:
            out = self._forward(batch, rows)  # [B, 1, V]
            for index, row in enumerate(rows):
                logits_of[row.first + row.count - 1] = out[index, -1]
        return torch.stack([logits_of[token] for token in wanted])

    def _forward(self, batch: Ragged, rows: list[Row]) -> torch.Tensor:
        """The last column's logits [B, 1, V] of rows that bring equally many tokens."""
        padded = left_padded(batch, rows)
        ids, positions = batch.ids[padded.tokens], batch.positions[padded.tokens]
        cache = self._cached(dense_cache(self._pages, padded.kept))
        return self._call(ids, positions, None, attention_mask=padded.mask, **cache)

    def _cached(self, cache: Any) -> dict[str, Any]:
        if self._call.cache_name is None:
            raise TypeError("its forward takes no cache")
        return {self._call.cache_name: cache, "use_cache": True}
