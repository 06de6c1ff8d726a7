"""Encoders: texts in, vectors or scores out, nothing kept. Three ways. ``packed``: layers compute on tokens
alone, all texts in one row, and attention, which goes through transformers' registry, is ours. ``padded``:
the model's own attention on texts of like length with a mask. ``alone``: one text after the other. Knows no
request; which way a model goes is decided in :mod:`.choose_encoder`.

Shape letters: N texts, T tokens of all of them, B texts of a grid, L columns of it, W width, R tokens wanted.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shoal.attention.base import PagedKernel
from shoal.attention.hook import attach
from shoal.attention.rows import RowContext, texts_batch
from shoal.model.row import Rows

__all__ = ["AloneEncoder", "EncoderModel", "PackedEncoder", "PaddedEncoder", "Texts", "pooled"]

_MOST_PADDING = 1.25


@dataclass(frozen=True, slots=True)
class Texts:
    """One step's texts."""

    ids: torch.Tensor  # [T] int64, text after text
    lengths: Sequence[int]
    type_ids: torch.Tensor | None = None  # [T] int64

    @property
    def starts(self) -> torch.Tensor:
        """First token of each text, [N]."""
        lengths = torch.tensor(self.lengths)
        return lengths.cumsum(0) - lengths


@dataclass(frozen=True, slots=True)
class Grid:
    """Some of the texts, one a row, padded on the right."""

    texts: torch.Tensor  # [B] int64: which
    tokens: torch.Tensor  # [t] int64: which tokens
    cells: torch.Tensor  # [t] int64: the cell, row * L + column, that each of them stands in
    ids: torch.Tensor  # [B, L] int64
    mask: torch.Tensor  # [B, L] int64
    type_ids: torch.Tensor | None


def pooled(rows: torch.Tensor, texts: Texts, pooling: str) -> torch.Tensor:
    """A vector a text, [N, W] float32.

    Args:
        rows: [T, W].
        pooling: ``mean``, ``cls`` (a text's first token) or ``last``.
    """
    lengths = torch.tensor(texts.lengths, device=rows.device)
    ends = lengths.cumsum(0)
    if pooling == "cls":
        return rows[ends - lengths].float()
    if pooling == "last":
        return rows[ends - 1].float()
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=rows.device), lengths)
    sums = rows.new_zeros(len(lengths), rows.shape[1], dtype=torch.float32)
    return sums.index_add_(0, owner, rows.float()) / lengths[:, None]


class EncoderModel(ABC):
    """What all ways have in common: the model is called on grids, its results are told by tokens."""

    way = ""
    makes_vectors = True
    """Of each token. False: below its head are latents, or tokens drawn together; only the head answers."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module
        base = module.base_model
        self._base = base
        self._names = {part: inspect.signature(part.forward).parameters for part in (module, base)}
        pad = getattr(module.config.get_text_config(), "pad_token_id", None)
        self._pad_id = pad if isinstance(pad, int) and pad >= 0 else 0
        self._head = module.get_output_embeddings()

    def hidden(self, texts: Texts) -> torch.Tensor:
        """What the model below its head makes of each token, [T, W]."""
        return self._by_token(texts, ((grid, self._hidden_of(grid)) for grid in self.grids(texts)))

    def class_logits(self, texts: Texts) -> torch.Tensor:
        """A classifier's logits of each text, [N, classes]."""
        out: torch.Tensor | None = None
        for grid in self.grids(texts):
            logits = _first(self._call(self.module, grid), "logits")
            if out is None:
                out = logits.new_empty(len(texts.lengths), logits.shape[-1])
            out[grid.texts] = logits
        assert out is not None
        return out

    def token_logits(self, texts: Texts) -> torch.Tensor:
        """A classifier's logits of each token, [T, classes]."""
        found = ((grid, _first(self._call(self.module, grid), "logits")) for grid in self.grids(texts))
        return self._by_token(texts, found)

    def word_logits(self, texts: Texts, wanted: torch.Tensor) -> torch.Tensor:
        """Logits of the vocabulary at tokens ``wanted`` [R], [R, V]. The head sees these tokens alone, where
        it is a module that the model calls."""
        out: torch.Tensor | None = None
        for grid in self.grids(texts):
            here = torch.isin(grid.tokens, wanted)
            if not bool(here.any()):
                continue
            cells = grid.cells[here]
            with self._narrowed(cells, grid) as is_narrow:
                logits = _first(self._call(self.module, grid), "logits")
            # Some models answer for as many columns as they have positions for, whatever the text's length.
            logits = logits[0] if is_narrow else logits[:, : grid.ids.shape[1]].flatten(0, 1)[cells]
            if out is None:
                out = logits.new_empty(len(wanted), logits.shape[-1])
            places = (wanted[:, None] == grid.tokens[here]).nonzero()
            out[places[:, 0]] = logits[places[:, 1]]
        assert out is not None, "some token is wanted"
        return out

    @abstractmethod
    def grids(self, texts: Texts) -> list[Grid]:
        """The texts as the model is called with them."""

    def _hidden_of(self, grid: Grid) -> torch.Tensor:
        """[B, L, W]."""
        return _first(self._call(self._base, grid), "last_hidden_state")

    def _call(self, part: nn.Module, grid: Grid) -> Any:
        names = self._names[part]
        needed = {name for name, parameter in names.items() if parameter.default is parameter.empty}
        given = {str(getattr(part, "main_input_name", "input_ids")): grid.ids}
        if grid.type_ids is not None and "token_type_ids" in names:
            given["token_type_ids"] = grid.type_ids
        elif "token_type_ids" in needed:
            given["token_type_ids"] = torch.zeros_like(grid.ids)
        if "attention_mask" in names and (len(grid.ids) > 1 or "attention_mask" in needed):
            given["attention_mask"] = grid.mask
        return part(**given, **({"use_cache": False} if "use_cache" in names else {}))

    def _grid(self, texts: Texts, chosen: Sequence[int]) -> Grid:
        """A grid of the chosen texts."""
        device, starts = texts.ids.device, texts.starts
        longest = max(texts.lengths[index] for index in chosen)
        lengths = torch.tensor([texts.lengths[index] for index in chosen])
        mask = torch.arange(longest) < lengths[:, None]
        cells = mask.flatten().nonzero()[:, 0]
        row, column = cells // longest, cells % longest
        tokens = (starts[torch.tensor(chosen)][row] + column).to(device)
        ids = torch.full((len(chosen) * longest,), self._pad_id, device=device)
        cells = cells.to(device)
        ids[cells] = texts.ids[tokens]
        type_ids = None
        if texts.type_ids is not None:
            type_ids = torch.zeros_like(ids)
            type_ids[cells] = texts.type_ids[tokens]
            type_ids = type_ids.view(len(chosen), longest)
        return Grid(
            torch.tensor(chosen, device=device), tokens, cells, ids.view(len(chosen), longest),
            mask.to(device=device, dtype=torch.int64), type_ids,
        )  # fmt: skip

    def _by_token(self, texts: Texts, found: Iterator[tuple[Grid, torch.Tensor]]) -> torch.Tensor:
        out: torch.Tensor | None = None
        for grid, values in found:
            if values.shape[:2] != grid.ids.shape:
                raise ValueError(f"it makes {list(values.shape)} of tokens {list(grid.ids.shape)}")
            rows = values.flatten(0, 1)[grid.cells]
            if len(grid.texts) == len(texts.lengths) and bool((grid.texts.diff() == 1).all()):
                return rows
            if out is None:
                out = rows.new_empty(len(texts.ids), rows.shape[-1])
            out[grid.tokens] = rows
        assert out is not None
        return out

    @contextmanager
    def _narrowed(self, cells: torch.Tensor, grid: Grid) -> Iterator[list[bool]]:
        """Have the head called with some cells alone, [1, R, W]; yields a list that is not empty then."""
        seen: list[bool] = []

        def narrow(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            given = args[0] if args else None
            if not isinstance(given, torch.Tensor) or given.shape[:2] != grid.ids.shape:
                return None
            seen.append(True)
            return (given.flatten(0, 1)[cells][None], *args[1:])

        handle = None if self._head is None else self._head.register_forward_pre_hook(narrow)
        try:
            yield seen
        finally:
            if handle is not None:
                handle.remove()


def _first(out: Any, name: str) -> torch.Tensor:
    """What a model gives under a name; or first, or alone, where its code gives no names."""
    found = out if isinstance(out, torch.Tensor) else getattr(out, name, None)
    result: torch.Tensor = out[0] if found is None else found
    return result


class AloneEncoder(EncoderModel):
    """One text after the other, without a mask: what the others are measured by."""

    way = "alone"

    def grids(self, texts: Texts) -> list[Grid]:
        return [self._grid(texts, [index]) for index in range(len(texts.lengths))]


class PaddedEncoder(EncoderModel):
    """Texts of like length together, padded on the right.

    Args:
        most_padding: cells of a grid for each token in it.
    """

    way = "padded"

    def __init__(self, module: PreTrainedModel, most_padding: float = _MOST_PADDING) -> None:
        super().__init__(module)
        self._most_padding = most_padding

    def grids(self, texts: Texts) -> list[Grid]:
        order = sorted(range(len(texts.lengths)), key=lambda index: texts.lengths[index], reverse=True)
        groups: list[list[int]] = []
        cells = tokens = 0
        for index in order:
            length = texts.lengths[index]
            longest = texts.lengths[groups[-1][0]] if groups else length
            if not groups or cells + longest > self._most_padding * (tokens + length):
                groups.append([])
                cells, tokens, longest = 0, 0, length
            groups[-1].append(index)
            cells, tokens = cells + longest, tokens + length
        return [self._grid(texts, group) for group in groups]


class PackedEncoder(EncoderModel):
    """Layers compute on the tokens of all texts in one row; what is around them sees one grid of all texts.

    Args:
        module: with its weights.
        kernel: computes attention.
        is_causal: whether a token sees what comes before it alone.
    """

    way = "packed"

    def __init__(self, module: PreTrainedModel, kernel: PagedKernel, is_causal: bool) -> None:
        super().__init__(module)
        self.context = RowContext(kernel)
        attach(module, self.context, is_causal)
        self._rows: Rows | None = None
        self.before_step: Callable[[int], None] = lambda num_tokens: None
        """Called with a step's number of tokens."""

    def measure(self, ids: torch.Tensor) -> None:
        """Run the model on one text [T], and see where it calls attention from, and how often its layers.

        Raises:
            LookupError: attention is not called from layers.
        """
        self.plain(ids[None])
        self._rows = Rows(self.module, self.context.modules)
        with self._rows.counting():
            self.plain(ids[None])

    def plain(self, ids: torch.Tensor) -> torch.Tensor:
        """Run the model on one text [1, T], whose tokens attend without pages."""
        self.context.batch = None
        return self._hidden_of(self._grid(Texts(ids[0], [ids.shape[1]]), [0]))

    def hook(self) -> None:
        """Have layers called with rows from now on."""
        assert self._rows is not None, "measure comes first"
        self._rows.install()

    def grids(self, texts: Texts) -> list[Grid]:
        self.context.batch = texts_batch(texts.lengths, texts.ids.device)
        self.before_step(len(texts.ids))
        return [self._grid(texts, range(len(texts.lengths)))]

    def unhook(self) -> None:
        """Have layers called as the model calls them."""
        if self._rows is not None:
            self._rows.remove()

    def _call(self, part: nn.Module, grid: Grid) -> Any:
        if self._rows is None or self.context.batch is None:
            return super()._call(part, grid)
        with self._rows.over(grid.cells, grid.ids.shape):
            return super()._call(part, grid)
