"""Our paged attention on the CPU against the reference, and its promise: a row depends on itself alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shoal.attention.base import KVShape, LayerPages, Variant
from shoal.attention.cpu import CpuPaged
from shoal.attention.pages import allocate, write
from shoal.attention.sdpa import paged_eager
from shoal.jit.team import Team
from support.paged import PagedCase, paged_case

MIXED = [(9, 1), (1, 1), (400, 1), (7, 7), (1, 1), (130, 33), (300, 300), (129, 2), (128, 128)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}  # bfloat16: half a unit in the last place of 4


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, Team]]:
    made = {count: Team(count) for count in (1, 2, 3)}
    yield made
    for team in made.values():
        team.close()


@pytest.fixture(scope="module")
def kernel(teams: dict[int, Team]) -> CpuPaged:
    return CpuPaged(teams[2])


def reference(case: PagedCase, variant: Variant, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """What the reference makes of the same numbers in float64, with zeros where nobody's positions are."""
    pages = LayerPages(case.pages.keys.double().nan_to_num(0.0), case.pages.values.double().nan_to_num(0.0))
    return paged_eager(case.query.double(), pages, case.batch, variant, sinks).float()


def assert_equal(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.float(), want, rtol=0.0, atol=TOLERANCE[got.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("query_heads", "shape", "block_size"),
    [
        (6, KVShape(2, 64, 64), 16),
        (9, KVShape(3, 64, 64), 16),
        (4, KVShape(4, 128, 128), 32),
        (5, KVShape(1, 80, 96), 3),
        (16, KVShape(2, 256, 256), 8),
        (71, KVShape(1, 16, 8), 1),
        (8, KVShape(4, 7, 21), 5),
        (50, KVShape(1, 192, 128), 300),
    ],
)
def test_a_ragged_batch_of_any_shape_equals_the_reference(
    kernel: CpuPaged, dtype: torch.dtype, query_heads: int, shape: KVShape, block_size: int
) -> None:
    case = paged_case(MIXED, query_heads=query_heads, shape=shape, block_size=block_size, dtype=dtype)
    variant = Variant(shape.key_width**-0.5)
    assert_equal(kernel(case.query, case.pages, case.batch, variant, None), reference(case, variant))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
@pytest.mark.parametrize("window", [None, 1, 5, 40, 128, 200, 5000])
def test_every_variant_equals_the_reference(
    kernel: CpuPaged, dtype: torch.dtype, with_sinks: bool, softcap: float | None, window: int | None
) -> None:
    case = paged_case(MIXED, dtype=dtype)
    sinks = torch.tensor([0.0, -30.0, 3.0, 1.5, -1.0, 40.0]) if with_sinks else None
    variant = Variant(0.3, window, softcap)
    assert_equal(kernel(case.query, case.pages, case.batch, variant, sinks), reference(case, variant, sinks))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_length_around_a_key_block_and_up_to_3000(teams: dict[int, Team], threads: int) -> None:
    lengths = [*range(1, 40), *range(120, 136), *range(250, 262), 383, 384, 385, 1000, 2048, 2999, 3000]
    shape = KVShape(1, 32, 32)
    case = paged_case([(length, 1) for length in lengths], query_heads=2, shape=shape)
    variant = Variant(0.2)
    got = CpuPaged(teams[threads])(case.query, case.pages, case.batch, variant, None)
    assert_equal(got, reference(case, variant))


def test_a_long_context_alone_is_shared_by_the_threads_and_equals_the_reference(kernel: CpuPaged) -> None:
    case = paged_case([(3000, 1)])
    for variant in (Variant(0.125), Variant(0.125, window=700)):
        assert_equal(kernel(case.query, case.pages, case.batch, variant, None), reference(case, variant))
    assert kernel._fields[29:31].all(), "results of parts were merged"


def test_slopes_shift_scores_by_distance(kernel: CpuPaged) -> None:
    """ALiBi by hand: softmax of score + slope * (key's position - query's)."""
    case = paged_case([(200, 3)], query_heads=4, shape=KVShape(4, 16, 16))
    slopes = torch.tensor([0.5, 0.25, 0.0625, 0.0])
    got = kernel(case.query, case.pages, case.batch, Variant(0.25), None, slopes)
    blocks = case.batch.prefills[0].block_ids
    keys, values = (pool[blocks].flatten(0, 1)[:200] for pool in (case.pages.keys, case.pages.values))
    for token in range(3):
        seen = 198 + token
        distance = torch.arange(seen) - (seen - 1)
        for head in range(4):
            scores = keys[:seen, head] @ case.query[token, head] * 0.25 + slopes[head] * distance
            torch.testing.assert_close(got[token, head], scores.softmax(0) @ values[:seen, head])


@pytest.mark.parametrize("window", [None, 100])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(teams: dict[int, Team], window: int | None) -> None:
    together = [(600, 1), (130, 33), (1, 1), (257, 257), (9, 1), (700, 60)]
    variant, sinks = Variant(0.2, window), torch.linspace(-2.0, 2.0, 6)
    case = paged_case(together)
    everything = CpuPaged(teams[2])(case.query, case.pages, case.batch, variant, sinks)
    for identity, sequence in enumerate(together):
        alone = paged_case([sequence], identities=[identity])
        got = CpuPaged(teams[1])(alone.query, alone.pages, alone.batch, variant, sinks)
        assert torch.equal(got, everything[case.rows[identity]])


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 129])
def test_a_prompt_has_the_same_bits_whole_and_in_chunks(kernel: CpuPaged, chunk: int) -> None:
    tokens, variant = 300, Variant(0.2, softcap=30.0)
    whole = paged_case([(tokens, tokens)], identities=[5])
    want = kernel(whole.query, whole.pages, whole.batch, variant, None)
    for start in range(0, tokens, chunk):
        end = min(start + chunk, tokens)
        part = paged_case([(end, end - start)], identities=[5])
        got = kernel(part.query, part.pages, part.batch, variant, None)
        assert torch.equal(got, want[start:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_threads_gives_the_same_bits(teams: dict[int, Team], dtype: torch.dtype) -> None:
    for sequences in (MIXED, [(2000, 1)], [(1500, 200)]):
        case = paged_case(sequences, dtype=dtype)
        one, two, three = (
            CpuPaged(team)(case.query, case.pages, case.batch, Variant(0.15), None) for team in teams.values()
        )
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_positions_out_of_the_window_and_of_nobody_are_never_looked_at(kernel: CpuPaged) -> None:
    case = paged_case([(500, 1)])
    want = kernel(case.query, case.pages, case.batch, Variant(0.2, window=150), None)
    assert case.batch.decode is not None
    table = case.batch.decode.block_table[0]
    for pool in (case.pages.keys, case.pages.values):
        assert pool.isnan().any(), "what belongs to nobody is not a number"
        pool[table[: 350 // 16]] = float("nan")
    assert torch.equal(kernel(case.query, case.pages, case.batch, Variant(0.2, window=150), None), want)
    assert want.isfinite().all()


@pytest.mark.parametrize("bad", ["query", "keys", "values"])
def test_what_is_not_a_number_stays_visible(kernel: CpuPaged, bad: str) -> None:
    case = paged_case([(40, 1)])
    blocks = case.batch.decode.block_table if case.batch.decode else torch.zeros(0)
    if bad == "query":
        case.query[:] = float("nan")
    else:
        getattr(case.pages, bad)[blocks[0, 0], 3] = float("nan")
    assert kernel(case.query, case.pages, case.batch, Variant(0.2), None).isnan().all()


def test_enormous_scores_and_sinks_overflow_nothing(kernel: CpuPaged) -> None:
    case = paged_case([(300, 1), (300, 5)])
    case.query *= 1e4
    sinks = torch.tensor([1e30, -1e30, 0.0, 1e4, -1e4, 88.0])
    variant = Variant(1.0)
    got = kernel(case.query, case.pages, case.batch, variant, sinks)
    assert_equal(got, reference(case, variant, sinks))
    assert (got[:, 0] == 0).all(), "a sink that takes everything leaves nothing"


def test_queries_of_any_strides_are_read_where_they_lie(kernel: CpuPaged) -> None:
    case = paged_case([(20, 1), (33, 33)])
    variant = Variant(0.2)
    want = kernel(case.query, case.pages, case.batch, variant, None)
    by_head = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    by_column = case.query.transpose(0, 2).contiguous().transpose(0, 2)
    for query in (by_head, by_column):
        assert not query.is_contiguous()
        assert torch.equal(kernel(query, case.pages, case.batch, variant, None), want)


def test_layers_of_one_step_may_differ_in_window_and_shape(kernel: CpuPaged) -> None:
    """One batch, two kinds of layer in turn: what is kept of one is not taken for the other."""
    small = paged_case([(50, 1), (40, 40)], query_heads=2, shape=KVShape(2, 16, 16))
    large = paged_case([(50, 1), (40, 40)], query_heads=8, shape=KVShape(1, 96, 32))
    large.batch = small.batch
    for _ in range(2):
        for case, variant in ((small, Variant(0.2)), (large, Variant(0.1)), (small, Variant(0.2, window=4))):
            got = kernel(case.query, case.pages, case.batch, variant, None)
            assert_equal(got, reference(case, variant))


@pytest.mark.parametrize("tokens", [1, 5, 700])
@pytest.mark.parametrize("page_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_are_written_as_the_reference_writes_them(
    kernel: CpuPaged, dtype: torch.dtype, page_dtype: torch.dtype, tokens: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    shape = KVShape(3, 40, 24)
    ours, theirs = (allocate([shape], 100, 8, page_dtype, torch.device("cpu"))[0] for _ in range(2))
    keys = (
        torch.randn(3, tokens, 40, generator=generator).to(dtype).transpose(0, 1)
    )  # heads first, as in a model
    values = torch.randn(tokens, 3, 24, generator=generator).to(dtype)
    slots = torch.randperm(800, generator=generator)[:tokens]
    kernel.write(ours, keys, values, slots)
    write(theirs, keys.to(page_dtype), values.to(page_dtype), slots)
    assert torch.equal(ours.keys, theirs.keys)
    assert torch.equal(ours.values, theirs.values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_refused_by_name(kernel: CpuPaged, dtype: torch.dtype) -> None:
    case = paged_case([(4, 1)], dtype=dtype)
    with pytest.raises(ValueError, match=str(dtype)):
        kernel(case.query, case.pages, case.batch, Variant(0.2), None)
    with pytest.raises(ValueError, match=str(dtype)):
        kernel.write(case.pages, case.query, case.query, torch.tensor([0]))
