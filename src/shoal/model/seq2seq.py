"""Encoder-decoders over KV pages. The encoder runs once per request; what cross-attention makes of its output
is kept in pages beside the decoder's own K and V, and the decoder goes the padded way
(:mod:`shoal.model.causal`), rows with encoder inputs of any lengths side by side.

How rows may be put together differs from model to model, and is a :class:`Manner`, found by trying in
:mod:`.choose_seq2seq`. Knows no family and no scheduler.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from shoal.attention.base import KVShape, LayerPages
from shoal.attention.cross_cache import CrossBatch, cross_cache, cross_pages, kept_shapes
from shoal.model.base import Ragged, Row, Source
from shoal.model.causal import left_padded

__all__ = ["EncoderDecoder", "Manner"]

_LEAST_BUCKET = 16  # encoder tokens; inputs up to that long go together


@dataclass(frozen=True, slots=True)
class Manner:
    """What a model's own code allows of a batch. Less is always right, and slower."""

    mixes_lengths: bool = True  # decoders' rows of several lengths, padded on the left
    takes_chunks: bool = True  # several of a decoder's tokens at once
    mixes_inputs: bool = True  # encoder inputs of several lengths, padded on the right

    def __str__(self) -> str:
        limits = (
            (self.mixes_lengths, "decoders of equal length together"),
            (self.takes_chunks, "their tokens one by one"),
            (self.mixes_inputs, "encoder inputs of equal length together"),
        )
        return ", ".join(text for is_free, text in limits if not is_free)


@dataclass(slots=True)
class _Member:
    """One row of a group that goes through the decoder together."""

    row: Row
    source: Source
    hidden: torch.Tensor | None  # [S, D] of its encoder, where cross-attention has not kept it yet


class EncoderDecoder:
    """An encoder-decoder with a cache for both."""

    way = "seq2seq"
    keeps_kv = True

    def __init__(self, module: PreTrainedModel, manner: Manner) -> None:
        self.manner = manner
        self._module = module
        self._encoder: Any = module.get_encoder()
        names = set(inspect.signature(module.forward).parameters)
        self._cache_name = next((n for n in ("cache", "past_key_values") if n in names), None)
        self._own: list[KVShape] = []
        self._cross: list[KVShape] = []
        self._output_class: type[Any] = BaseModelOutput  # what the encoder gives back
        self._width = 0  # D: of the encoder's output
        self._pages: list[LayerPages] = []

    @property
    def config(self) -> Any:
        """The model's own."""
        return self._module.config

    @property
    def kv_shapes(self) -> Sequence[KVShape]:
        """Known once :meth:`plain` has run."""
        places = cross_pages(self._own, self._cross)
        apart = [shape for place, shape in zip(places, self._cross, strict=True) if place >= len(self._own)]
        return self._own + apart

    def use_pages(self, pages: list[LayerPages]) -> None:
        self._pages = pages

    def plain(self, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of a decoder whose encoder is given the same ``ids``, without pages."""
        if not self._own:
            self._measure(ids)
        return self.whole(ids, ids)[wanted]

    def whole(self, encoder_ids: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of one decoder sequence ``ids`` [T] on ``encoder_ids`` [S], by the model as it is."""
        with unchanged(self._encoder):
            logits: torch.Tensor = self._module(
                input_ids=encoder_ids[None],
                attention_mask=torch.ones_like(encoder_ids)[None],
                decoder_input_ids=ids[None],
                use_cache=False,
                return_dict=True,
            ).logits
        return logits[0]

    def stepwise(self, encoder_ids: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The same token by token with the model's own cache, as ``generate`` computes them."""
        hidden, mask = self.encode([encoder_ids]), torch.ones_like(encoder_ids)[None]
        cache, found = None, []
        for token in ids[:, None]:
            out = self._decode(token[None], hidden, mask, **{self._name_of_cache(): cache})
            cache = getattr(out, self._name_of_cache())
            found.append(out.logits[0, -1])
        return torch.stack(found)

    def _measure(self, ids: torch.Tensor) -> None:
        """Note what a cache of the model's own keeps, after a decoder's first token."""
        hidden = self.encode([ids])
        self._width = hidden.shape[-1]
        out = self._decode(ids[None, :1], hidden, torch.ones_like(ids)[None])
        self._own, self._cross = kept_shapes(getattr(out, self._name_of_cache(), None))

    def _decode(self, ids: torch.Tensor, hidden: torch.Tensor, mask: torch.Tensor, **further: Any) -> Any:
        """The model's output for decoder ``ids`` [B, Q] on the encoder's ``hidden`` [B, S, D]."""
        return self._module(
            encoder_outputs=self._output_class(last_hidden_state=hidden),
            attention_mask=mask,
            decoder_input_ids=ids,
            use_cache=True,
            return_dict=True,
            **further,
        )

    def logits(self, batch: Ragged) -> torch.Tensor:
        """See :class:`shoal.model.base.ServedModel`."""
        hidden = self._encoded(batch)
        members = [
            _Member(row, source, hidden.get(index))
            for index, (row, source) in enumerate(zip(batch.rows, batch.sources, strict=True))
        ]
        logits_of: dict[int, torch.Tensor] = {}
        for group in self._groups(members):
            for member, logits in zip(group, self._last_logits(batch, group), strict=True):
                logits_of[member.row.first + member.row.count - 1] = logits
        return torch.stack([logits_of[token] for token in batch.wanted.tolist()])

    # The encoder

    def _encoded(self, batch: Ragged) -> dict[int, torch.Tensor]:
        """The encoder's output [S, D] for each row, by its number, whose input is to be encoded now."""
        pending = [(n, source.ids) for n, source in enumerate(batch.sources) if source.ids is not None]
        pending.sort(key=lambda entry: len(entry[1]))
        hidden: dict[int, torch.Tensor] = {}
        for _, bucket in groupby(pending, key=lambda entry: self._bucket(len(entry[1]))):
            indices, inputs = zip(*bucket, strict=True)
            for index, ids, states in zip(indices, inputs, self.encode(inputs), strict=True):
                hidden[index] = states[: len(ids)]
        return hidden

    def _bucket(self, length: int) -> int:
        """Inputs of one bucket are encoded together: padding is at most what they themselves are."""
        if not self.manner.mixes_inputs:
            return length
        return max(_LEAST_BUCKET, 1 << (length - 1).bit_length())

    def encode(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The encoder's output [B, S, D] for inputs padded on the right."""
        width = max(len(ids) for ids in inputs)
        padding: int = getattr(self._module.config, "pad_token_id", None) or 0
        ids = inputs[0].new_full((len(inputs), width), padding)
        mask = torch.zeros_like(ids)
        for row, own in enumerate(inputs):
            ids[row, : len(own)] = own
            mask[row, : len(own)] = 1
        with unchanged(self._encoder):
            out = self._encoder(input_ids=ids, attention_mask=mask, return_dict=True)
        self._output_class = type(out)
        hidden: torch.Tensor = out.last_hidden_state
        return hidden

    # The decoder

    def _groups(self, members: list[_Member]) -> Iterator[list[_Member]]:
        """Members that go together: what they bring, and what they have, is laid out alike."""

        def key(member: _Member) -> tuple[int, bool, int]:
            row, is_new = member.row, member.hidden is not None
            is_mixed = row.count == 1 and self.manner.mixes_lengths
            return row.count, is_new, -1 if is_mixed else row.start

        for _, group in groupby(sorted(members, key=key), key=key):
            yield list(group)

    def _last_logits(self, batch: Ragged, group: list[_Member]) -> torch.Tensor:
        """Logits [B, V] after the last token of each of a group."""
        if self.manner.takes_chunks or group[0].row.count == 1:
            return self._forward(batch, group)
        logits = batch.ids.new_empty(0)
        for place in range(group[0].row.count):
            singles = [
                _Member(
                    replace(m.row, first=m.row.first + place, count=1, start=m.row.start + place),
                    m.source,
                    None if place else m.hidden,
                )
                for m in group
            ]
            logits = self._forward(batch, singles)
        return logits

    def _forward(self, batch: Ragged, group: list[_Member]) -> torch.Tensor:
        """As :meth:`_last_logits`, in one pass."""
        tokens, mask, kept = left_padded(batch, [member.row for member in group])
        cross = self._cross_batch(group, batch.block_size)
        crossed = [self._pages[place] for place in cross_pages(self._own, self._cross)]
        cache = cross_cache(self._pages[: len(self._own)], crossed, kept, cross)
        further = {"decoder_attention_mask": mask, self._name_of_cache(): cache}
        out = self._decode(batch.ids[tokens], self._hidden(group, cross), cross.mask, **further)
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def _cross_batch(self, group: list[_Member], block_size: int) -> CrossBatch:
        width = max(member.source.length for member in group)
        device = group[0].source.block_ids.device
        slots = torch.zeros(len(group), width, dtype=torch.int64, device=device)
        mask = torch.zeros_like(slots)
        offsets = torch.arange(block_size, device=device)
        for index, member in enumerate(group):
            length, blocks = member.source.length, member.source.block_ids
            slots[index, :length] = (blocks[:, None] * block_size + offsets).flatten()[:length]
            mask[index, :length] = 1
        return CrossBatch(slots, mask, is_computed=group[0].hidden is None)

    def _hidden(self, group: list[_Member], cross: CrossBatch) -> torch.Tensor:
        """The encoder's output [B, S, D]; where cross-attention has kept it, something of this shape."""
        rows, width = cross.slots.shape
        if cross.is_computed:
            return torch.zeros((), dtype=self._module.dtype, device=cross.slots.device).expand(
                rows, width, self._width
            )
        hidden = torch.zeros(rows, width, self._width, dtype=self._module.dtype, device=cross.slots.device)
        for index, member in enumerate(group):
            assert member.hidden is not None
            hidden[index, : len(member.hidden)] = member.hidden
        return hidden

    def _name_of_cache(self) -> str:
        if self._cache_name is None:
            raise TypeError("its forward takes no cache")
        return self._cache_name


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """What a call changes of the module's parts and settings is put back, so that no input has a say in how
    the next is computed. (BigBird's first short input turns its sparse attention off for good.)
    """
    parts = [(part, dict(part._modules), _settings(part)) for part in module.modules()]
    try:
        yield
    finally:
        for part, children, settings in parts:
            if any(part._modules.get(name) is not child for name, child in children.items()):
                part._modules.update(children)
            if _settings(part) != settings:
                part.__dict__.update(settings)


def _settings(part: nn.Module) -> dict[str, bool | int | float | str]:
    return {name: value for name, value in vars(part).items() if isinstance(value, (bool, int, float, str))}
