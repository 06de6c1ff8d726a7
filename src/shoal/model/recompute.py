"""Decoders without a cache that could be kept: every step computes whole sequences. Correct, and slower by
about the length of a sequence. Knows no scheduler and no model by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from shoal.attention.base import KVShape, LayerPages, PagedKernel
from shoal.model.base import Ragged, Row
from shoal.model.causal import Caller

__all__ = ["COST", "RecomputeCausal", "next_logits"]

COST = "nothing is kept between steps: every token costs a pass over its whole sequence"

_LEAST_FILLED = 0.75  # of a padded batch's longest row: below, padding costs more than another call


def next_logits(module: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits [B, V] of the token after ids [B, T], as ``generate`` computes them without a cache.

    The model's own ``prepare_inputs_for_generation`` decides what it is called with: some models append a
    mask token to be filled in, or a mask of who sees whom.
    """
    prepare = getattr(module, "prepare_inputs_for_generation", None)
    if prepare is None:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return Caller(module)(ids, positions, None, use_cache=False)[:, -1]
    accepted = inspect.signature(module.forward).parameters
    given = {"attention_mask": torch.ones_like(ids), "use_cache": False}
    prepared = dict(prepare(ids, **given))
    positions_of = getattr(module, "_prepare_position_ids_for_generation", None)
    is_asked = "position_ids" in accepted and prepared.get("position_ids") is None
    if positions_of is not None and is_asked and prepared.get("input_ids", ids).shape == ids.shape:
        # generate gives them to all models, also to those that would count otherwise by themselves (RoBERTa)
        prepared["position_ids"] = positions_of(ids, given)
    arguments = {name: value for name, value in prepared.items() if name in accepted and value is not None}
    logits: torch.Tensor = module(**arguments, return_dict=True).logits
    return logits[:, -1]


class RecomputeCausal:
    """See :class:`shoal.model.base.ServedModel`. Rows bring all their tokens, from position 0.

    Rows of about one length go together, padded on the right, where that is right (whether it is, is tried);
    else rows of exactly one length.
    """

    way = "recompute"
    keeps_kv = False
    kv_shapes: Sequence[KVShape] = ()

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        self._call = Caller(module)
        self._pads = True

    @classmethod
    def of(cls, module: PreTrainedModel, kernel: PagedKernel) -> RecomputeCausal:
        """The module served this way, untested."""
        return cls(module)

    @property
    def notes(self) -> tuple[str, ...]:
        """What it costs."""
        alike = "about equal" if self._pads else "equal"
        return (f"{COST}; sequences of {alike} length share one",)

    def be_more_careful(self) -> bool:
        """See :class:`shoal.model.base.Careful`."""
        was_padding, self._pads = self._pads, False
        return was_padding

    def use_pages(self, pages: list[LayerPages]) -> None:
        """There is nothing to put into them."""

    def plain(self, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return torch.cat([next_logits(self._module, ids[None, : last + 1]) for last in wanted.tolist()])

    def logits(self, batch: Ragged) -> torch.Tensor:
        last_logits: dict[int, torch.Tensor] = {}
        for rows in self._groups(batch.rows):
            out = (
                self._padded(batch, rows) if self._pads else next_logits(self._module, _stacked(batch, rows))
            )
            last_logits |= {row.first + row.count - 1: out[index] for index, row in enumerate(rows)}
        return torch.stack([last_logits[token] for token in batch.wanted.tolist()])

    def _groups(self, rows: Sequence[Row]) -> list[list[Row]]:
        groups: list[list[Row]] = []
        least = _LEAST_FILLED if self._pads else 1.0
        for row in sorted(rows, key=lambda row: -row.count):
            assert row.start == 0, "this model keeps nothing that a sequence could go on from"
            if groups and row.count >= least * groups[-1][0].count:
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups

    def _padded(self, batch: Ragged, rows: list[Row]) -> torch.Tensor:
        """Logits [B, V] at the rows' last tokens; what stands behind those is seen by none of them."""
        ids = torch.zeros(len(rows), rows[0].count, dtype=torch.int64, device=batch.ids.device)
        for index, row in enumerate(rows):
            ids[index, : row.count] = batch.ids[row.first : row.first + row.count]
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        columns = sorted({row.count - 1 for row in rows})
        logits = self._call(ids, positions, torch.tensor(columns, device=ids.device), use_cache=False)
        return torch.stack([logits[index, columns.index(row.count - 1)] for index, row in enumerate(rows)])


def _stacked(batch: Ragged, rows: list[Row]) -> torch.Tensor:
    """Ids [B, T] of rows of one length."""
    return torch.stack([batch.ids[row.first : row.first + row.count] for row in rows])
