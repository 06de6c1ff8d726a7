"""Random paged batches: sequences in scattered blocks, everything that is not theirs not a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.attention.base import AttentionBatch, DecodeGroup, KVShape, LayerPages, Prefill
from shoal.attention.pages import allocate, write

__all__ = ["PagedCase", "paged_case"]


@dataclass(slots=True)
class PagedCase:
    """What a paged kernel is called with. Sequences are numbered as they were asked for."""

    query: torch.Tensor  # [T, Hq, Ek]
    pages: LayerPages
    batch: AttentionBatch
    rows: list[slice]  # each sequence's tokens


def paged_case(
    sequences: Sequence[tuple[int, int]],
    *,
    query_heads: int = 6,
    shape: KVShape = KVShape(2, 64, 64),
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    identities: Sequence[int] | None = None,
    unused: float = float("nan"),
) -> PagedCase:
    """A batch of (positions visible to the last token, new tokens).

    Args:
        identities: a number for each sequence; its content depends on that and the position alone, so that
            the same sequence can be put into other batches. None: 0, 1, ...
        unused: fills every position that belongs to nobody.
    """
    identities = range(len(sequences)) if identities is None else identities
    counts = [-(-length // block_size) for length, _ in sequences]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(len(counts))).tolist()
    pages = allocate([shape], len(order), block_size, dtype, torch.device("cpu"))[0]
    pages.keys.fill_(unused), pages.values.fill_(unused)
    tables, queries = [], []
    for (length, new), count, identity in zip(sequences, counts, identities, strict=True):
        table = torch.tensor([order.pop() for _ in range(count)])
        at = torch.arange(length)
        content = _content(identity, length, query_heads, shape, dtype)
        write(pages, content[1], content[2], table[at // block_size] * block_size + at % block_size)
        tables.append(table)
        queries.append(content[0][length - new :])
    return _assembled(sequences, tables, queries, pages)


def _content(
    identity: int, length: int, query_heads: int, shape: KVShape, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of the first positions of a sequence of up to 4096."""
    generator = torch.Generator().manual_seed(identity)
    widths = (query_heads * shape.key_width, shape.heads * shape.key_width, shape.heads * shape.value_width)
    everything = torch.randn(length, sum(widths), generator=generator).to(dtype)
    q, k, v = everything.split(widths, 1)
    return q.view(length, query_heads, -1), k.view(length, shape.heads, -1), v.view(length, shape.heads, -1)


def _assembled(
    sequences: Sequence[tuple[int, int]],
    tables: Sequence[torch.Tensor],
    queries: Sequence[torch.Tensor],
    pages: LayerPages,
) -> PagedCase:
    """Single tokens first, as a step's batch has them."""
    ordered = sorted(range(len(sequences)), key=lambda i: sequences[i][1] > 1)
    singles = [i for i in ordered if sequences[i][1] == 1]
    decode = None
    if singles:
        block_table = torch.zeros(len(singles), max(len(tables[i]) for i in singles), dtype=torch.int64)
        for row, i in enumerate(singles):
            block_table[row, : len(tables[i])] = tables[i]
        decode = DecodeGroup(block_table, torch.tensor([sequences[i][0] for i in singles]))
    rows, prefills, start = [slice(0, 0)] * len(sequences), [], 0
    for i in ordered:
        length, new = sequences[i]
        rows[i] = slice(start, start + new)
        if new > 1:
            prefills.append(Prefill(start, start + new, tables[i], length))
        start += new
    batch = AttentionBatch(torch.zeros(0, dtype=torch.int64), decode, prefills)
    return PagedCase(torch.cat([queries[i] for i in ordered]), pages, batch, rows)
