"""Decoders that keep a state of fixed size beside, or in place of, keys and values: a slot for each sequence.
Knows no scheduler and no model by name.

The state goes in and out through whatever the model itself hands from call to call (:mod:`.carry`). Keys and
values of a hybrid's attention layers live in pages, as on the padded way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from transformers import DynamicCache, PreTrainedModel

from shoal.attention.base import KVShape, LayerPages, PagedKernel
from shoal.attention.dense_cache import PaddedBatch, page_in
from shoal.attention.pages import write
from shoal.model.base import Ragged, Row
from shoal.model.carry import (
    Carry,
    Seen,
    attributes_of,
    changed_attributes,
    keys_and_values,
    look,
    restore,
)
from shoal.model.causal import Caller, left_padded
from shoal.plan.carried import carried, switches

__all__ = ["StateCausal"]

_LOOK_TOKENS = (5, 7)  # of the calls that show what is kept

_LEVELS: tuple[tuple[bool, Literal["any", "by length", "alone"]], ...] = (
    (True, "any"),
    (False, "any"),
    (True, "by length"),
    (True, "alone"),
    (False, "by length"),
    (False, "alone"),
)
"""Whether chunks continue a state, and which sequences decode together; the fast ones first."""


class StateCausal:
    """See :class:`shoal.model.base.KeepsState`.

    Sequences that bring one token go together, each longer one alone: there is no padding into a recurrence.
    What is tried, and given up where it does not prove: that a chunk continues a state (else it goes in token
    by token), and that sequences of several lengths decode together (else those of one length, or none).
    """

    way = "state"
    keeps_kv = True

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        self._call = Caller(module)
        self._switches = switches(module)
        self._carry: Carry | None = None
        self._kv_layers: list[int] = []
        self._shapes: list[KVShape] = []
        self._pages: list[LayerPages] = []
        self._slots: list[torch.Tensor] = []
        self._level = 0
        self._fills_given = False

    @classmethod
    def of(cls, module: PreTrainedModel, kernel: PagedKernel) -> StateCausal:
        """The module served this way, untested; it brings its own kernel."""
        return cls(module)

    @property
    def kv_shapes(self) -> Sequence[KVShape]:
        """Known once :meth:`plain` has run, like :attr:`state_bytes`."""
        return self._shapes

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(spec.num_bytes for spec in self._carry.specs) if self._carry is not None else 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What is kept, and what costs more than it might."""
        layers = f", and keys and values of {len(self._shapes)} layers" if self._shapes else ""
        found = [f"a state of {self.state_bytes} bytes for each sequence{layers}; no prefix is reused"]
        continues, together = _LEVELS[self._level]
        if not continues:
            found.append("a prompt's later chunks are computed token by token: its code continues no state")
        if together != "any":
            found.append(f"sequences decode {together}, not together whatever their lengths")
        return tuple(found)

    def be_more_careful(self) -> bool:
        """See :class:`shoal.model.base.Careful`."""
        if self._carry is None or self._level + 1 == len(_LEVELS):
            return False
        self._level += 1
        return True

    def use_pages(self, pages: list[LayerPages]) -> None:
        self._pages = pages

    def use_slots(self, num_slots: int) -> None:
        """Keep so many states from now on; written once, as pages are."""
        device = next(self._module.parameters()).device
        self._slots = [
            torch.zeros(num_slots, *spec.shape, dtype=spec.dtype, device=device)
            for spec in self._carry_().specs
        ]

    def plain(self, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        if self._carry is None:
            self._carry = self._look(ids.device)
        positions = torch.arange(len(ids), device=ids.device)
        return self._call(ids[None], positions[None], wanted, use_cache=False)[0]

    def logits(self, batch: Ragged) -> torch.Tensor:
        last_logits: dict[int, torch.Tensor] = {}
        for rows in self._groups(batch.rows):
            out = self._forward(batch, rows)  # [B, V]
            last_logits |= {row.first + row.count - 1: out[index] for index, row in enumerate(rows)}
        return torch.stack([last_logits[token] for token in batch.wanted.tolist()])

    def _groups(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Rows that are computed together, in the order of their tokens."""
        continues, together = _LEVELS[self._level]
        begun: list[Row] = []
        by_length: dict[int, list[Row]] = {}
        alone: list[list[Row]] = []
        for row in rows:
            if row.count > 1 or together == "alone":
                is_cut = row.start > 0 and not continues
                alone += [[part] for part in _one_by_one(row)] if is_cut else [[row]]
            elif row.start:
                by_length.setdefault(0 if together == "any" else row.length, []).append(row)
            else:
                begun.append(row)
        return [*([begun] if begun else []), *by_length.values(), *alone]

    def _forward(self, batch: Ragged, rows: list[Row]) -> torch.Tensor:
        """The last column's logits [B, V] of rows that bring equally many tokens, all new or none."""
        carry, padded = self._carry_(), left_padded(batch, rows)
        tokens = padded.tokens
        slots = torch.tensor([row.slot for row in rows], device=batch.ids.device)
        given: dict[str, Any] = {**self._switches}
        if rows[0].start:
            given |= carry.put([kept[slots] for kept in self._slots])
            self._page_in(given, padded.kept)
            if self._shapes and not bool(padded.mask.all()):
                given["attention_mask"] = padded.mask
        else:
            carry.forget(len(rows), tokens.device)
        logits, left = self._called(batch.ids[tokens], batch.positions[tokens], given)
        if not rows[0].start:
            self._write_out(left, padded.kept)
        for kept, tensor in zip(self._slots, carry.take(left), strict=True):
            kept[slots] = tensor
        return logits[:, -1]

    def _called(
        self, ids: torch.Tensor, positions: torch.Tensor, given: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Logits [B, 1, V] of the last column, and what the call left by argument.

        A model that makes no cache of its own, or does not say which, fills the one it is given.
        """
        name = self._call.cache_name
        if self._fills_given and name is not None:
            given.setdefault(name, DynamicCache())
        logits, output = self._call.output(ids, positions, None, **given)
        left = carried(self._module, output)
        if not left and name is not None and name in given:
            left = {name: given[name]}
        return logits, left

    def _page_in(self, given: dict[str, Any], batch: PaddedBatch) -> None:
        """Have the attention layers of a cache read and write pages."""
        if not self._kv_layers:
            return
        cache = next(value for value in given.values() if hasattr(value, "layers"))
        pages = dict(zip(self._kv_layers, self._pages, strict=True))
        for number, layer in enumerate(cache.layers):
            page_in(layer, pages.get(number), batch)

    def _write_out(self, left: dict[str, Any], batch: PaddedBatch) -> None:
        """Keys and values of new sequences into pages; a sliding layer has kept its window's only."""
        layers = keys_and_values(left)
        if list(layers) != self._kv_layers:
            raise RuntimeError(
                f"layers {list(layers)} keep keys and values, where {self._kv_layers} did before"
            )
        for layer, pages in zip(layers.values(), self._pages, strict=True):
            count = min(layer.keys.shape[2], batch.new)
            slots = batch.slots.view(-1, batch.new)[:, batch.new - count :].flatten()
            keys, values = (
                x[:, :, -count:].transpose(1, 2).flatten(0, 1) for x in (layer.keys, layer.values)
            )
            write(pages, keys, values, slots)

    def _look(self, device: torch.device) -> Carry:
        """See what the model keeps.

        Raises:
            TypeError: nothing, or what cannot be kept in a slot.
        """
        initial = attributes_of(self._module)
        tokens, more = _LOOK_TOKENS
        self._fills_given = not self._seen(1, tokens, initial, device).carried
        runs = [
            self._seen(rows, count, initial, device) for rows, count in ((1, tokens), (2, tokens), (1, more))
        ]
        return look(self._module, runs)

    def _seen(self, rows: int, count: int, initial: Any, device: torch.device) -> Seen:
        ids = torch.arange(rows * count, device=device).view(rows, count) % self._call.vocabulary
        positions = torch.arange(count, device=device).expand_as(ids)
        _, left = self._called(ids, positions, {**self._switches})
        layers = keys_and_values(left)
        self._kv_layers = list(layers)
        self._shapes = [KVShape(x.keys.shape[1], x.keys.shape[3], x.values.shape[3]) for x in layers.values()]
        for layer in layers.values():
            layer.keys = layer.values = None
        changed = changed_attributes(self._module, initial)
        restore(changed, initial)
        return Seen(left, changed)

    def _carry_(self) -> Carry:
        assert self._carry is not None, "a plain run comes first"
        return self._carry


def _one_by_one(row: Row) -> list[Row]:
    return [
        Row(row.first + index, 1, row.start + index, row.block_ids, row.slot) for index in range(row.count)
    ]
