"""Rotation against transformers' own functions, and what is written into pages."""

from __future__ import annotations

import pytest
import torch
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as cohere
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama

from shoal.attention.base import LayerPages
from shoal.attention.pages import write
from shoal.cpu_kernels.rotary import rotate
from shoal.jit.team import Team

ROWS = 7


def tables(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [rows, width / 2] of random angles."""
    angles = torch.rand(ROWS, width // 2) * 100
    return angles.cos(), angles.sin()


def heads(width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value heads as views of one fused projection."""
    fused = torch.randn(ROWS, 5 * width)
    return (
        fused[:, : 3 * width].view(ROWS, 3, width),
        fused[:, 3 * width : 4 * width].view(ROWS, 1, width),
        fused[:, 4 * width :].view(ROWS, 1, width),
    )


@pytest.mark.parametrize("width", [2, 16, 20, 64])
@pytest.mark.parametrize("is_full", [True, False])
def test_halves_are_rotated_as_llamas(width: int, is_full: bool, pair: Team) -> None:
    query, key, value = heads(width)
    cos, sin = tables(width)
    twice = [torch.cat([table, table], -1) for table in (cos, sin)]
    expected = llama(query[None].transpose(1, 2), key[None].transpose(1, 2), *[t[None] for t in twice])
    kept = value.clone()
    rotate(query, key, *(twice if is_full else (cos, sin)), pair)
    for got, want in zip((query, key), expected, strict=True):
        torch.testing.assert_close(got, want[0].transpose(0, 1), atol=1e-6, rtol=1e-6)
    assert torch.equal(value, kept)


@pytest.mark.parametrize("is_full", [True, False])
def test_neighbours_are_rotated_as_coheres(is_full: bool, team: Team) -> None:
    query, key, _ = heads(20)
    cos, sin = tables(20)
    twice = [table.repeat_interleave(2, -1) for table in (cos, sin)]
    expected = cohere(query[None].transpose(1, 2), key[None].transpose(1, 2), *[t[None] for t in twice])
    rotate(query, key, *(twice if is_full else (cos, sin)), team, is_interleaved=True)
    for got, want in zip((query, key), expected, strict=True):
        torch.testing.assert_close(got, want[0].transpose(0, 1), atol=1e-6, rtol=1e-6)


def test_part_of_a_head_is_rotated_as_gptjs(team: Team) -> None:
    query, key, _ = heads(20)
    cos, sin = tables(12)
    rotated = gptj(key[None, ..., :12].clone(), sin[None], cos[None])[0]
    expected = torch.cat([rotated, key[..., 12:]], -1)
    rotate(query, key, cos, sin, team, rotary_width=12, is_interleaved=True)
    torch.testing.assert_close(key, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotated_keys_and_values_land_in_their_slots_and_nowhere_else(
    dtype: torch.dtype, team: Team, pair: Team
) -> None:
    slots = torch.tensor([8, 3, 15, 0, 9, 4, 1])
    for threads in (team, pair):
        query, key, value = torch.randn(ROWS, 4, 6), torch.randn(ROWS, 2, 6), torch.randn(ROWS, 2, 10)
        pages = LayerPages(torch.zeros(4, 4, 2, 6, dtype=dtype), torch.zeros(4, 4, 2, 10, dtype=dtype))
        got = LayerPages(pages.keys.clone(), pages.values.clone())
        rotate(
            query,
            key,
            *tables(6),
            threads,
            value=value,
            slots=slots,
            key_pages=got.keys,
            value_pages=got.values,
        )
        write(pages, key.to(dtype), value.to(dtype), slots)  # by then the keys are rotated
        assert torch.equal(got.keys, pages.keys)
        assert torch.equal(got.values, pages.values)


def test_a_row_with_a_negative_slot_is_written_nowhere(team: Team) -> None:
    query, key, value = heads(4)
    pages = torch.zeros(2, 4, 1, 4), torch.zeros(2, 4, 1, 4)
    slots = torch.full((ROWS,), -1)
    slots[2] = 5
    rotate(query, key, *tables(4), team, value=value, slots=slots, key_pages=pages[0], value_pages=pages[1])
    assert pages[0].flatten(0, 1).any(-1).any(-1).nonzero().flatten().tolist() == [5]
    assert torch.equal(pages[1][1, 1], value[2])


def test_bfloat16_pages_round_to_even_and_keep_nan_and_infinity(team: Team) -> None:
    bits = torch.tensor(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 0]
    )
    value = bits.to(torch.int32).view(torch.float32).view(1, 1, 8)
    pages = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    still = torch.ones(1, 4), torch.zeros(1, 4)
    rotate(
        torch.zeros(1, 1, 8),
        torch.zeros(1, 1, 8),
        *still,
        team,
        value=value,
        slots=torch.zeros(1, dtype=torch.int64),
        key_pages=pages[0],
        value_pages=pages[1],
    )
    assert torch.equal(pages[1].flatten().nan_to_num(7.0), value.flatten().bfloat16().nan_to_num(7.0))
    assert torch.equal(pages[1].isnan(), value.view(1, 1, 1, 8).isnan())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rotary_width": 3}, ValueError, "rotary_width: even"),
        ({"cos": torch.zeros(ROWS, 3)}, ValueError, "cos: float32"),
        ({"query": torch.zeros(ROWS, 1, 8)}, ValueError, "query"),
        ({"query": torch.zeros(ROWS, 3, 4).double()}, TypeError, "query: float32"),
        ({"query": torch.zeros(ROWS, 4, 3).transpose(1, 2)}, ValueError, "query"),
        ({"slots": torch.zeros(ROWS, dtype=torch.int64)}, ValueError, "all or none"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: dict[str, object], error: type[Exception], message: str, team: Team
) -> None:
    cos, sin = tables(4)
    given = {"query": torch.zeros(ROWS, 3, 4), "key": torch.zeros(ROWS, 1, 4), "cos": cos, "sin": sin}
    with pytest.raises(error, match=message):
        rotate(team=team, **{**given, **change})  # type: ignore[arg-type]
