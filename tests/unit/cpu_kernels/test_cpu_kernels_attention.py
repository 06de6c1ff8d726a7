"""The pieces of paged attention against torch: products, transposition, a row's softmax, merging, dealing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from shoal.cpu_kernels import attention_arguments as at
from shoal.cpu_kernels.attention_block import merge_rows
from shoal.cpu_kernels.attention_plan import ITEMS_PER_THREAD, plan_items
from shoal.cpu_kernels.attention_products import score_product, transpose_tile, value_product
from shoal.cpu_kernels.attention_scores import MOST_QUERIES, score_few
from shoal.cpu_kernels.attention_vectors import (
    blend_vectors,
    exponentials,
    largest,
    softcap_vectors,
    vector_lanes,
)
from shoal.jit.compile import kernel

ROWS = [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 48]


@kernel
def lanes() -> int:
    count: int = vector_lanes()
    return count


@kernel(fastmath=False)
def largest_of(address: int, count: int) -> float:
    value: float = largest(address, count)
    return value


@kernel(fastmath=False)
def exponentials_of(address: int, count: int, shift: float) -> float:
    value: float = exponentials(address, count, shift)
    return value


@kernel(fastmath=False)
def softcap_of(address: int, count: int, cap: float) -> None:
    softcap_vectors(address, count, cap)


@kernel(fastmath=False)
def blend_of(target: int, source: int, count: int, keep: float, take: float) -> None:
    blend_vectors(target, source, count, keep, take)


def pages(width: int, dtype: torch.dtype) -> torch.Tensor:
    """[50 slots, 3 heads, width]."""
    return torch.randn(50, 3, width).to(dtype)


def some_slots(count: int) -> torch.Tensor:
    return torch.randperm(50)[:count]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 80])
def test_a_tile_of_keys_is_transposed_out_of_the_pages(width: int, dtype: torch.dtype) -> None:
    tile = 2 * lanes()
    pool, slots = pages(width, dtype), some_slots(tile)
    out = torch.full((width, tile), float("nan"))
    item = pool.element_size()
    transpose_tile(
        slots.data_ptr(), pool[0, 1].data_ptr(), 3 * width * item, width, int(item == 2), out.data_ptr()
    )
    assert torch.equal(out, pool[slots, 1].float().T)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 64, 100])
def test_scores_are_products_and_a_row_does_not_see_the_others(rows: int, width: int) -> None:
    tile = 2 * lanes()
    queries, keys = torch.randn(rows, width), torch.randn(width, tile)
    out = torch.full((rows, 128), float("nan"))
    score_product(rows, queries.data_ptr(), 4 * width, width, keys.data_ptr(), out.data_ptr(), 512)
    torch.testing.assert_close(out[:, :tile], queries @ keys, rtol=1e-5, atol=1e-4)
    assert out[:, tile:].isnan().all(), "nothing beside the result is written"
    alone = torch.empty(1, 128)
    score_product(1, queries[-1].data_ptr(), 0, width, keys.data_ptr(), alone.data_ptr(), 0)
    assert torch.equal(alone[0, :tile], out[-1, :tile])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", range(1, MOST_QUERIES + 1))
@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 100])
def test_scores_of_few_queries_straight_out_of_the_pages_have_the_bits_of_the_product(
    rows: int, width: int, dtype: torch.dtype
) -> None:
    tile = 2 * lanes()
    pool, slots, queries = pages(width, dtype), some_slots(tile), torch.randn(rows, width)
    got, want = (torch.full((rows, 128), float("nan")) for _ in range(2))
    item = pool.element_size()
    score_few(
        rows, queries.data_ptr(), 4 * width, width, slots.data_ptr(), pool[0, 1].data_ptr(),
        3 * width * item, int(item == 2), got.data_ptr(), 512,
    )  # fmt: skip
    columns = pool[slots, 1].float().T.contiguous()
    score_product(rows, queries.data_ptr(), 4 * width, width, columns.data_ptr(), want.data_ptr(), 512)
    assert torch.equal(got[:, :tile], want[:, :tile])
    assert got[:, tile:].isnan().all(), "nothing beside the result is written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 8, 21, 64, 80, 112])
def test_values_are_weighted_and_a_row_does_not_see_the_others(
    rows: int, width: int, dtype: torch.dtype
) -> None:
    pool, slots, weights = pages(width, dtype), some_slots(40), torch.randn(rows, 128)
    out = torch.full((rows, width + 3), float("nan"))
    item = pool.element_size()

    def compute(count: int, first_weight: int, to: torch.Tensor) -> None:
        value_product(
            count, first_weight, 512, 5, 37, pool[0, 2].data_ptr(), 3 * width * item,
            slots.data_ptr(), width, int(item == 2), to.data_ptr(), to.stride(0) * 4,
        )  # fmt: skip

    compute(rows, weights.data_ptr(), out)
    want = weights[:, 5:37] @ pool[slots[5:37], 2].float()
    torch.testing.assert_close(out[:, :width], want, rtol=1e-5, atol=1e-4)
    assert out[:, width:].isnan().all(), "nothing beside the result is written"
    alone = torch.empty(1, width)
    compute(1, weights[-1].data_ptr(), alone)
    assert torch.equal(alone[0], out[-1, :width])


def test_exponentials_are_right_to_a_few_units_in_the_last_place() -> None:
    x = torch.linspace(-86.9, 0.0, 12800)
    y = x.clone()
    total = exponentials_of(y.data_ptr(), len(y), np.float32(0.0))
    want = x.double().exp()
    assert float(((y.double() - want) / want).abs().max()) < 3e-7
    assert total == pytest.approx(float(want.sum()), rel=1e-6)


def test_exponentials_of_minus_infinity_are_zero_and_of_nan_nan() -> None:
    x = torch.zeros(32)
    x[3], x[7], x[9] = float("-inf"), -1000.0, float("nan")
    exponentials_of(x.data_ptr(), 32, np.float32(0.0))
    assert x[3] == 0.0 and x[7] == 0.0 and x[9].isnan() and x[0] == 1.0


@pytest.mark.parametrize("at_index", [0, 5, 31, 32, 127])
def test_the_largest_is_found_anywhere(at_index: int) -> None:
    x = torch.full((128,), float("-inf"))
    x[at_index] = -7.5
    assert largest_of(x.data_ptr(), 128) == -7.5


@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
def test_a_soft_cap_is_tanh(cap: float) -> None:
    x = torch.cat([torch.linspace(-3 * cap, 3 * cap, 250), torch.tensor([0.0, 1e-4, -1e30, 1e30, 5.0, 6.0])])
    got = x.clone()
    softcap_of(got.data_ptr(), len(x), np.float32(cap))
    want = torch.tanh(x.double() / cap) * cap
    torch.testing.assert_close(got.double(), want, rtol=0.0, atol=3e-7 * cap)


def test_blending_keeps_and_takes() -> None:
    target, source = torch.randn(48), torch.randn(48)
    want = target * 0.25 + source * 3.0
    blend_of(target.data_ptr(), source.data_ptr(), 48, np.float32(0.25), np.float32(3.0))
    torch.testing.assert_close(target, want)


def test_partial_softmaxes_merge_into_the_whole_and_an_empty_one_changes_nothing() -> None:
    """Records of 16 values and 16 more floats, the last two the largest score and the sum of the weights."""
    call = np.zeros(at.CALL_LENGTH, np.int64)
    call[at.RECORD_STRIDE] = 4 * 32
    scores, values = torch.randn(90) * 5, torch.randn(90, 16)

    def record(keys: slice) -> torch.Tensor:
        out = torch.full((1, 32), float("nan"))
        out[0, 30:] = torch.tensor([float("-inf"), 0.0])
        if len(scores[keys]):
            top = scores[keys].max()
            weights = (scores[keys] - top).exp()
            out[0, :16], out[0, 30], out[0, 31] = weights @ values[keys], top, weights.sum()
            out[0, 16:30] = 0.0
        return out

    def merge(total: torch.Tensor, partial: torch.Tensor) -> None:
        merge_rows(call.ctypes.data, 1, total.data_ptr(), partial.data_ptr())

    total = record(slice(0, 0))
    for keys in (slice(0, 30), slice(0, 0), slice(30, 31), slice(31, 90)):
        before = total.clone()
        merge(total, record(keys))
        assert (keys != slice(0, 0)) or torch.equal(total, before)
    torch.testing.assert_close(total[0, :16] / total[0, 31], scores.softmax(0) @ values)


def laid_out(
    sequences: list[tuple[int, int]], heads: int, group: int, window: int, threads: int, together: int = 100
) -> tuple[list[list[list[int]]], list[list[int]], int]:
    """Each thread's items, the merges, and the records needed, for sequences of (tokens, length)."""
    rows = np.zeros((len(sequences), at.SEQUENCE_LENGTH), np.int64)
    rows[:, at.NUM_TOKENS], rows[:, at.LENGTH] = zip(*sequences, strict=True)
    tiles = sum(-(-tokens * group // at.TILE_ROWS) for tokens, _ in sequences) * heads
    room = tiles + 2 * ITEMS_PER_THREAD * (threads + heads)
    items, merges = np.full((room, at.ITEM_LENGTH), -9), np.full((tiles, at.ITEM_LENGTH), -9)
    bounds = np.full(threads + 2, -9)
    addresses = [array.ctypes.data for array in (items, bounds, merges)]
    records = plan_items(rows.ctypes.data, len(rows), heads, group, window, together, threads, *addresses)
    assert bounds[0] == 0 and 0 < bounds[threads] <= room
    dealt = [items[bounds[t] : bounds[t + 1]].tolist() for t in range(threads)]
    return dealt, merges[: bounds[threads + 1]].tolist(), int(records)


STEPS = [
    ([(1, 200)], 3, 3),
    ([(1, 8000)], 3, 3),
    ([(1, 200)] * 32, 3, 3),
    ([(300, 300), (1, 5000), (17, 400), (1, 1)], 2, 4),
    ([(5, 5)], 1, 71),
    ([(1, 1)], 1, 1),
]


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("together", [0, 2, 100])
@pytest.mark.parametrize("window", [0, 1, 130])
@pytest.mark.parametrize(("sequences", "heads", "group"), STEPS)
def test_every_row_meets_every_key_block_that_it_sees_once(
    sequences: list[tuple[int, int]], heads: int, group: int, window: int, together: int, threads: int
) -> None:
    dealt, merges, records = laid_out(sequences, heads, group, window, threads, together)
    met: dict[tuple[int, int, int], list[int]] = {}
    parts: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for sequence, head, first_row, count, first, last, record, num_heads in (
        item for items in dealt for item in items
    ):
        assert 0 < count * num_heads <= at.TILE_ROWS and first < last
        assert num_heads <= max(together, 1)
        for row in itertools.product(range(head, head + num_heads), range(first_row, first_row + count)):
            met.setdefault((sequence, *row), []).extend(range(first, last))
        if record >= 0:
            where = parts.setdefault((sequence, head, first_row), [])
            where += [(block, record + (block - first) * count * num_heads) for block in range(first, last)]
    for sequence, (tokens, length) in enumerate(sequences):
        for row, head in itertools.product(range(tokens * group), range(heads)):
            position = length - tokens + row // group
            first_seen = max(0, position - window + 1) if window else 0
            blocks = met.pop((sequence, head, row))
            assert len(set(blocks)) == len(blocks)
            assert set(range(first_seen // at.KEY_BLOCK, position // at.KEY_BLOCK + 1)) <= set(blocks)
    assert not met
    used: list[int] = []
    for sequence, head, first_row, count, first, last, record, num_heads in merges:
        rows = count * num_heads
        want = [(first + i, record + i * rows) for i in range(last - first)]
        assert parts.pop((sequence, head, first_row)) == want, "the blocks' records follow each other"
        used += range(record, record + (last - first) * rows)
    assert not parts and sorted(used) == list(range(records))


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize(("sequences", "heads", "group"), [STEPS[1], STEPS[2], STEPS[3]])
def test_threads_get_even_shares(
    sequences: list[tuple[int, int]], heads: int, group: int, threads: int
) -> None:
    dealt, _, _ = laid_out(sequences, heads, group, 0, threads)
    shares = []
    for items in dealt:
        share = 0
        for sequence, _, first_row, count, first, last, _, num_heads in items:
            tokens, length = sequences[sequence]
            seen = length - tokens + (first_row + count - 1) // group + 1
            share += num_heads * (min(last * at.KEY_BLOCK, seen) - first * at.KEY_BLOCK) * (count + 16)
        shares.append(share)
    assert max(shares) <= 1.3 * sum(shares) / threads


def test_short_contexts_of_many_sequences_are_not_cut() -> None:
    dealt, merges, records = laid_out([(1, 200)] * 32, 3, 3, 0, 2)
    assert not merges and not records
    assert [len(items) for items in dealt] == [16, 16], "an item has all heads, which lie side by side"


def test_heads_go_to_several_threads_where_there_are_few_blocks() -> None:
    dealt, merges, _ = laid_out([(1, 100)], 3, 3, 0, 2)
    assert not merges
    assert [[item[at.NUM_HEADS] for item in items] for items in dealt] == [[1], [2]]
