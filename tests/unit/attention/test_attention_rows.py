"""Attention to both sides: texts in a row do not see each other, and every kernel agrees with plain sums."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from shoal.attention.base import KVShape, LayerPages, PagedKernel, Variant
from shoal.attention.cpu import CpuPaged
from shoal.attention.rows import RowContext, texts_batch
from shoal.attention.sdpa import paged_eager, paged_sdpa
from shoal.jit.team import Team
from support.paged import paged_case

LENGTHS = (5, 1, 130, 40, 300, 1, 49)
HEADS, KV_HEADS, WIDTH = 6, 2, 20


@pytest.fixture(scope="module")
def kernels() -> Iterator[dict[str, PagedKernel]]:
    team = Team(2)
    yield {"sdpa": paged_sdpa, "eager": paged_eager, "cpu": CpuPaged(team)}
    team.close()


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> torch.Tensor:
    """One text, [T, H, E] each, in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhe,khe->hqk", q, k) * variant.scale
    if variant.window is not None:
        at = torch.arange(len(q))
        scores[:, (at[:, None] - at).abs() >= variant.window] = float("-inf")
    return torch.einsum("hqk,khe->qhe", scores.softmax(-1), v).float()


@pytest.mark.parametrize("name", ["sdpa", "eager", "cpu"])
@pytest.mark.parametrize("window", [None, 1, 7, 128, 140])
def test_every_text_of_a_row_attends_to_itself_alone(
    kernels: dict[str, PagedKernel], name: str, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    # As projections leave them: one row holds queries, keys and values.
    fused = torch.randn(tokens, HEADS + 2 * KV_HEADS, WIDTH, generator=generator)
    q, k, v = fused.split([HEADS, KV_HEADS, KV_HEADS], 1)
    variant = Variant(0.3, window, is_causal=False)
    context, module = RowContext(kernels[name]), nn.Identity()
    context.batch = texts_batch(LENGTHS)
    got = context.attend(module, q, k, v, variant, None)
    rows = [x.split(LENGTHS) for x in (q, k, v)]
    want = torch.cat([by_hand(*parts, variant) for parts in zip(*rows, strict=True)])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    context.batch = None  # alone, as when a model is looked at
    last = [x[-LENGTHS[-1] :] for x in (q, k, v)]
    alone = context.attend(module, last[0], last[1], last[2], variant, None)
    torch.testing.assert_close(alone, want[-LENGTHS[-1] :], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 40, 128, 200, 5000])
def test_pages_of_any_size_and_dtype_give_the_same(
    kernels: dict[str, PagedKernel], dtype: torch.dtype, window: int | None
) -> None:
    case = paged_case([(7, 7), (300, 300), (128, 128), (400, 33)], shape=KVShape(2, 24, 40), dtype=dtype)
    variant = Variant(0.3, window, is_causal=False)
    got = kernels["cpu"](case.query, case.pages, case.batch, variant, None)
    keys, values = (x.float().nan_to_num(0.0) for x in (case.pages.keys, case.pages.values))
    exact = LayerPages(keys, values)
    want = paged_eager(case.query.float(), exact, case.batch, variant, None)
    atol = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), want, atol=atol, rtol=0)
