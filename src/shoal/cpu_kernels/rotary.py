"""Rotary position embedding, and keys and values written into pages. Knows no attention and no model.

Rotation of a pair (a, b) by its position's angle: (a cos - b sin, b cos + a sin). Pairs are (i, i + R/2)
(rotate-half: llama, gpt-neox) or (2i, 2i + 1) (interleaved: gpt-j, cohere) of the first R of a head's E
values; the rest is left alone.
"""

from __future__ import annotations

import torch

from shoal.cpu_kernels.arguments import argument, run_job
from shoal.cpu_kernels.memory import load_float32, load_int64, store_bfloat16, store_float32
from shoal.jit.compile import kernel
from shoal.jit.team import Team

__all__ = ["rotary_job", "rotate"]

# Words of a job.
ROWS, Q, Q_BYTES, Q_HEADS, K, K_BYTES, K_HEADS, V, V_BYTES, WIDTH, VALUE_WIDTH = range(11)
COS, SIN, TABLE_BYTES, TABLE_STEP, ROTARY_WIDTH, IS_INTERLEAVED = range(11, 17)
SLOTS, KEY_PAGES, VALUE_PAGES, IS_BFLOAT16 = range(17, 21)
NUM_WORDS = 21


@kernel(fastmath=False)
def _rotate_head(x: int, cos: int, sin: int, step: int, width: int, is_interleaved: int) -> None:
    """One head's first ``width`` values in place."""
    half = width // 2
    if is_interleaved != 0:
        for i in range(half):
            a, b = load_float32(x, 2 * i), load_float32(x, 2 * i + 1)
            c, s = load_float32(cos, i * step), load_float32(sin, i * step)
            store_float32(x, 2 * i, a * c - b * s)
            store_float32(x, 2 * i + 1, b * c + a * s)
        return
    upper = x + 4 * half
    for i in range(half):
        a, b = load_float32(x, i), load_float32(upper, i)
        c, s = load_float32(cos, i), load_float32(sin, i)
        store_float32(x, i, a * c - b * s)
        store_float32(upper, i, b * c + a * s)


@kernel(fastmath=False)
def _write_head(
    source: int, pages: int, slot: int, heads: int, head: int, width: int, is_bfloat16: int
) -> None:
    """One head's values to its place in pages [slots, heads, width]."""
    first = (slot * heads + head) * width
    if is_bfloat16 != 0:
        target = pages + 2 * first
        for i in range(width):
            store_bfloat16(target, i, load_float32(source, i))
    else:
        target = pages + 4 * first
        for i in range(width):
            store_float32(target, i, load_float32(source, i))


@kernel(fastmath=False)
def rotary_job(index: int, count: int, words: int) -> int:
    """Rotate queries and keys in place and write keys and values to pages: the heads of one participant.

    Its words:
        ROWS; Q, Q_BYTES, Q_HEADS: address of the first row's queries, [heads, WIDTH] float32, bytes from row
        to row, heads; K, V likewise, V's heads being K_HEADS of VALUE_WIDTH.
        COS, SIN: addresses of the first row's tables, TABLE_BYTES from row to row; pair i is at i *
        TABLE_STEP (2 where an interleaved table has each value twice). ROTARY_WIDTH: R, 0 for no rotation.
        SLOTS: address of a slot per row, int64, or 0: nothing is written. KEY_PAGES [slots, K_HEADS, WIDTH],
        VALUE_PAGES [slots, K_HEADS, VALUE_WIDTH]: float32, or bfloat16 if IS_BFLOAT16. A row whose slot is
        negative is not written.
    """
    queries, keys = argument(words, Q_HEADS), argument(words, K_HEADS)
    slots, rotary_width = argument(words, SLOTS), argument(words, ROTARY_WIDTH)
    values = keys if slots != 0 else 0
    heads = queries + keys + values
    total = argument(words, ROWS) * heads
    for item in range(total * index // count, total * (index + 1) // count):
        row, head = item // heads, item % heads
        if head < queries + keys and rotary_width != 0:
            _rotate_item(words, row, head)
        if slots != 0 and head >= queries and load_int64(slots, row) >= 0:
            _write_item(words, row, head - queries)
    return 0


@kernel(fastmath=False)
def _rotate_item(words: int, row: int, head: int) -> None:
    """One query head, or behind them one key head."""
    queries, width = argument(words, Q_HEADS), argument(words, WIDTH)
    if head < queries:
        spot = argument(words, Q) + row * argument(words, Q_BYTES) + 4 * width * head
    else:
        spot = argument(words, K) + row * argument(words, K_BYTES) + 4 * width * (head - queries)
    table = row * argument(words, TABLE_BYTES)
    _rotate_head(
        spot,
        argument(words, COS) + table,
        argument(words, SIN) + table,
        argument(words, TABLE_STEP),
        argument(words, ROTARY_WIDTH),
        argument(words, IS_INTERLEAVED),
    )


@kernel(fastmath=False)
def _write_item(words: int, row: int, head: int) -> None:
    """One key head, or behind them one value head."""
    heads, slot = argument(words, K_HEADS), load_int64(argument(words, SLOTS), row)
    is_bfloat16 = argument(words, IS_BFLOAT16)
    if head < heads:
        width = argument(words, WIDTH)
        source = argument(words, K) + row * argument(words, K_BYTES) + 4 * width * head
        _write_head(source, argument(words, KEY_PAGES), slot, heads, head, width, is_bfloat16)
    else:
        width = argument(words, VALUE_WIDTH)
        source = argument(words, V) + row * argument(words, V_BYTES) + 4 * width * (head - heads)
        _write_head(source, argument(words, VALUE_PAGES), slot, heads, head - heads, width, is_bfloat16)


def rotate(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    team: Team,
    *,
    rotary_width: int | None = None,
    is_interleaved: bool = False,
    value: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    key_pages: torch.Tensor | None = None,
    value_pages: torch.Tensor | None = None,
) -> None:
    """Rotate queries and keys in place, and write keys and values into pages if there are any.

    Args:
        query, key: [M, Hq, E] and [M, H, E] float32, a row's heads side by side (rows need not be).
        cos, sin: [M, R / 2] float32; or [M, R], each value standing there twice: in two halves, or side by
            side if ``is_interleaved``.
        rotary_width: R; None: E.
        value: [M, H, Ev] float32; with ``slots`` [M] int64, ``key_pages`` [N, S, H, E] and ``value_pages``
            [N, S, H, Ev], float32 or bfloat16 and contiguous. A row goes to slot block * S + offset, and
            nowhere if its slot is negative.

    Raises:
        TypeError: another dtype.
        ValueError: shapes or strides that do not fit, or only some of ``value``, ``slots`` and pages.
    """
    rows, heads, width = key.shape
    rotary = width if rotary_width is None else rotary_width
    _check_heads(query, rows, None, width, "query")
    _check_heads(key, rows, heads, width, "key")
    if rotary % 2 or not 0 < rotary <= width:
        raise ValueError(f"rotary_width: even, 2 to {width}, got {rotary}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype != torch.float32 or table.shape not in ((rows, rotary // 2), (rows, rotary)):
            raise ValueError(f"{name}: float32 [{rows}, {rotary // 2} or {rotary}], got {list(table.shape)}")
    if cos.shape != sin.shape or cos.stride() != sin.stride() or cos.stride(1) != 1:
        raise ValueError("cos and sin: of one shape, rows contiguous")
    step = 2 if is_interleaved and cos.shape[1] == rotary else 1
    pages = _page_words(key, value, slots, key_pages, value_pages)
    value_place = (0, 0) if value is None else (value.data_ptr(), 4 * value.stride(0))
    run_job(
        team,
        rotary_job,
        rows,
        *(query.data_ptr(), 4 * query.stride(0), query.shape[1]),
        *(key.data_ptr(), 4 * key.stride(0), heads),
        *value_place,
        width,
        0 if value is None else value.shape[2],
        *(cos.data_ptr(), sin.data_ptr(), 4 * cos.stride(0), step, rotary, int(is_interleaved)),
        *pages,
    )


def _check_heads(tensor: torch.Tensor, rows: int, heads: int | None, width: int, what: str) -> None:
    if tensor.dtype != torch.float32:
        raise TypeError(f"{what}: float32, got {tensor.dtype}")
    expected = (rows, tensor.shape[1] if heads is None else heads, width)
    if tensor.shape != expected or (tensor.stride(2) != 1 and width > 1):
        raise ValueError(f"{what}: {list(expected)}, got {list(tensor.shape)}")
    if tensor.stride(1) != width and tensor.shape[1] > 1:
        raise ValueError(f"{what}: a row's heads side by side, got strides {tensor.stride()}")


def _page_words(
    key: torch.Tensor,
    value: torch.Tensor | None,
    slots: torch.Tensor | None,
    key_pages: torch.Tensor | None,
    value_pages: torch.Tensor | None,
) -> tuple[int, int, int, int]:
    """The words SLOTS to IS_BFLOAT16."""
    if value is None and slots is None and key_pages is None and value_pages is None:
        return 0, 0, 0, 0
    if value is None or slots is None or key_pages is None or value_pages is None:
        raise ValueError("value, slots, key_pages and value_pages: all or none")
    rows, heads, _ = key.shape
    _check_heads(value, rows, heads, value.shape[2], "value")
    if slots.dtype != torch.int64 or slots.shape != (rows,) or not slots.is_contiguous():
        raise ValueError(f"slots: contiguous int64 [{rows}], got {slots.dtype} {list(slots.shape)}")
    for name, pages, source in (("key_pages", key_pages, key), ("value_pages", value_pages, value)):
        if pages.shape[2:] != source.shape[1:] or not pages.is_contiguous():
            raise ValueError(f"{name}: contiguous [N, S, {source.shape[1]}, {source.shape[2]}]")
        if pages.dtype not in (torch.float32, torch.bfloat16) or pages.dtype != key_pages.dtype:
            raise TypeError(f"{name}: float32 or bfloat16, both alike, got {pages.dtype}")
    is_bfloat16 = int(key_pages.dtype == torch.bfloat16)
    return slots.data_ptr(), key_pages.data_ptr(), value_pages.data_ptr(), is_bfloat16
