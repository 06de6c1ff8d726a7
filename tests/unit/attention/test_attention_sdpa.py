"""The reference kernels against attention written out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.attention.base import AttentionBatch, DecodeGroup, KVShape, PagedKernel, Prefill, Variant
from shoal.attention.pages import allocate, write
from shoal.attention.sdpa import paged_eager, paged_sdpa, unpaged

HEADS, KV_HEADS, WIDTH, BLOCK = 6, 2, 8, 4


def by_hand(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, variant: Variant, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention of the last query tokens over all positions, one number at a time."""
    tokens, length = query.shape[0], key.shape[0]
    out = torch.zeros(tokens, HEADS, value.shape[-1], dtype=query.dtype)
    for token in range(tokens):
        at = length - tokens + token
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            first = 0 if variant.window is None else max(0, at - variant.window + 1)
            scores = [float(query[token, head] @ key[p, kv]) * variant.scale for p in range(first, at + 1)]
            if variant.softcap is not None:
                scores = [variant.softcap * math.tanh(s / variant.softcap) for s in scores]
            weights = [math.exp(s) for s in scores]
            total = sum(weights) + (math.exp(float(sinks[head])) if sinks is not None else 0.0)
            for weight, position in zip(weights, range(first, at + 1), strict=True):
                out[token, head] += weight / total * value[position, kv]
    return out


@pytest.mark.parametrize("kernel", [paged_sdpa, paged_eager])
@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"),
    [(None, None, False), (5, None, False), (None, 2.0, False), (3, None, True), (1, 2.0, True)],
)
def test_a_ragged_batch_equals_each_sequence_by_hand(
    kernel: PagedKernel, window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    generator = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # (positions, new tokens): two decodes, a whole prompt, a chunk of one
    sequences = [(9, 1), (1, 1), (7, 7), (10, 4)]
    variant = Variant(0.4, window, softcap)
    sinks = rand(HEADS) if with_sinks else None
    blocks = [torch.tensor(ids) for ids in ([11, 2, 7], [5], [9, 0], [3, 10, 1])]
    pages = allocate([KVShape(KV_HEADS, WIDTH, WIDTH)], 12, BLOCK, torch.float64, torch.device("cpu"))[0]
    pages.keys.fill_(50.0), pages.values.fill_(50.0)  # whatever is not ours would be seen
    keys = [rand(length, KV_HEADS, WIDTH) for length, _ in sequences]
    values = [rand(length, KV_HEADS, WIDTH) for length, _ in sequences]
    queries = [rand(new, HEADS, WIDTH) for _, new in sequences]
    for table, key, value in zip(blocks, keys, values, strict=True):
        at = torch.arange(len(key))
        write(pages, key, value, table[at // BLOCK] * BLOCK + at % BLOCK)

    table = torch.zeros(2, 3, dtype=torch.int64)
    table[0], table[1, 0] = blocks[0], blocks[1][0]
    batch = AttentionBatch(
        slots=torch.zeros(0, dtype=torch.int64),
        decode=DecodeGroup(table, torch.tensor([9, 1])),
        prefills=[Prefill(2, 9, blocks[2], 7), Prefill(9, 13, blocks[3], 10)],
    )
    got = kernel(torch.cat(queries), pages, batch, variant, sinks)
    want = [by_hand(q, k, v, variant, sinks) for q, k, v in zip(queries, keys, values, strict=True)]
    torch.testing.assert_close(got, torch.cat(want), rtol=1e-9, atol=1e-9)


def test_attention_without_pages_equals_by_hand() -> None:
    generator = torch.Generator().manual_seed(2)
    query, key, value = (
        torch.randn(5, heads, WIDTH, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    variant = Variant(0.3, window=2)
    got = unpaged(query, key, value, variant, None)
    torch.testing.assert_close(got, by_hand(query, key, value, variant, None), rtol=1e-9, atol=1e-9)
