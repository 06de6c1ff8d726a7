"""A step becomes a batch whose every token stands where its position says."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from msgspec import structs

from shoal.messages import PLACEHOLDER_ID, SamplingSpec, SequenceStep, Step, pack_ids, unpack_ids
from shoal.model.causal import attention_batch
from shoal.worker.inputs import build_batch

GREEDY = SamplingSpec(temperature=0.0)


def test_single_tokens_come_first_and_slots_follow_the_block_tables() -> None:
    chunk = SequenceStep(sequence_id=7, start=3, token_ids=pack_ids([30, 31, 32]), block_ids=pack_ids([9, 4]))
    decode = SequenceStep(
        sequence_id=8, start=4, token_ids=pack_ids([44]), block_ids=pack_ids([2, 6]), sampling=GREEDY
    )
    prompt = SequenceStep(
        sequence_id=9, start=0, token_ids=pack_ids([50, 51]), block_ids=pack_ids([1]), sampling=GREEDY
    )
    step = Step(step_id=0, sequences=(chunk, decode, prompt))
    batch, sampled = build_batch(step, block_size=4, device=torch.device("cpu"))
    assert batch.ids.tolist() == [44, 30, 31, 32, 50, 51]
    assert batch.positions.tolist() == [4, 3, 4, 5, 0, 1]
    assert batch.slots.tolist() == [6 * 4 + 0, 9 * 4 + 3, 4 * 4 + 0, 4 * 4 + 1, 1 * 4 + 0, 1 * 4 + 1]
    assert [(row.first, row.count, row.start, row.length) for row in batch.rows] == [
        (0, 1, 4, 5),
        (1, 3, 3, 6),
        (4, 2, 0, 2),
    ]
    assert batch.wanted.tolist() == [0, 5], "the last token of each sequence that samples"
    assert [sequence.sequence_id for sequence in sampled] == [8, 9]


def test_placeholders_are_filled_in_the_order_of_their_sequences() -> None:
    def share(number: int, *ids: int) -> SequenceStep:
        return SequenceStep(
            sequence_id=number, start=4, token_ids=pack_ids(ids), block_ids=pack_ids([1, 2]), sampling=GREEDY
        )

    step = Step(
        step_id=0, sequences=(share(1, 7, 8), share(2, PLACEHOLDER_ID), share(3, 9), share(4, PLACEHOLDER_ID))
    )
    batch, _ = build_batch(step, block_size=4, device=torch.device("cpu"), awaited=[50, 51])
    assert batch.ids.tolist() == [50, 9, 51, 7, 8]


def random_step(seed: int, num_sequences: int, most_tokens: int) -> Step:
    """Sequences of any kind in any order, each with blocks enough and sometimes more."""
    draw = random.Random(seed)
    sequences = []
    for number in range(num_sequences):
        start, count = draw.randrange(40), draw.randint(1, most_tokens)
        num_blocks = -(-(start + count) // 4) + draw.randrange(2)
        sequences.append(
            SequenceStep(
                sequence_id=number,
                start=start,
                token_ids=pack_ids(draw.randrange(1000) for _ in range(count)),
                block_ids=pack_ids(draw.sample(range(10_000), num_blocks)),
                sampling=draw.choice([GREEDY, None]),
            )
        )
    return Step(step_id=0, sequences=tuple(sequences))


@pytest.mark.parametrize("most_tokens", [1, 2, 9])
@pytest.mark.parametrize("seed", range(5))
def test_the_layout_for_attention_is_that_of_the_rows_one_by_one(seed: int, most_tokens: int) -> None:
    batch, _ = build_batch(random_step(seed, 12, most_tokens), block_size=4, device=torch.device("cpu"))
    ours = attention_batch(batch)
    theirs = attention_batch(dataclasses.replace(batch, rows=list(batch.rows), attention=None))
    assert ours is batch.attention and ours.slots.tolist() == theirs.slots.tolist()
    assert (ours.decode is None) == (theirs.decode is None)
    if ours.decode is not None and theirs.decode is not None:
        assert ours.decode.block_table.tolist() == theirs.decode.block_table.tolist()
        assert ours.decode.lengths.tolist() == theirs.decode.lengths.tolist()
    assert [(p.start, p.stop, p.block_ids.tolist(), p.length) for p in ours.prefills] == [
        (p.start, p.stop, p.block_ids.tolist(), p.length) for p in theirs.prefills
    ]


@pytest.mark.parametrize("seed", range(5))
def test_each_row_has_its_sequences_tokens_and_blocks(seed: int) -> None:
    step = random_step(seed, 9, 5)
    batch, _ = build_batch(step, block_size=4, device=torch.device("cpu"))
    found = sorted(
        (
            pack_ids(batch.ids[row.first : row.first + row.count].tolist()),
            row.start,
            pack_ids(row.block_ids.tolist()),
        )
        for row in batch.rows
    )
    assert found == sorted((s.token_ids, s.start, s.block_ids) for s in step.sequences)
    for row in batch.rows:
        positions = range(row.start, row.length)
        blocks = row.block_ids.tolist()
        slots = [blocks[position // 4] * 4 + position % 4 for position in positions]
        assert batch.slots[row.first : row.first + row.count].tolist() == slots
        assert batch.positions[row.first : row.first + row.count].tolist() == list(positions)


def test_paged_attention_of_single_tokens_asks_for_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    import shoal.worker.inputs as module

    made: list[int] = []
    monkeypatch.setattr(module, "Row", lambda first, *_: made.append(first))
    batch, _ = build_batch(random_step(0, 32, 1), block_size=4, device=torch.device("cpu"))
    assert attention_batch(batch).decode is not None and not made


@pytest.mark.parametrize("seed", range(3))
def test_layers_that_see_a_window_have_a_layout_of_their_own(seed: int) -> None:
    """The same rows and positions over other blocks; in place of those that are gone stands a row's own."""
    draw, step = random.Random(seed), random_step(seed, 12, 4)
    windowed = []
    for share in step.sequences:
        base = draw.randint(0, share.start // 4)
        held = len(share.block_ids) // 4 - base
        ids = pack_ids(draw.sample(range(500), held))
        windowed.append(structs.replace(share, window_block_ids=ids, window_base=base))
    step = Step(step_id=0, sequences=tuple(windowed))
    batch, _ = build_batch(step, block_size=4, device=torch.device("cpu"))
    main = attention_batch(batch)
    other = main.windowed
    assert other is not None and main.of(None) is main and main.of(7) is other
    by_table = {s.block_ids: s for s in step.sequences}
    tables = [list(unpack_ids(by_table[pack_ids(r.block_ids.tolist())].window_block_ids)) for r in batch.rows]
    whole = [
        table[:1] * by_table[pack_ids(row.block_ids.tolist())].window_base + table
        for row, table in zip(batch.rows, tables, strict=True)
    ]
    slots = [
        table[position // 4] * 4 + position % 4
        for row, table in zip(batch.rows, whole, strict=True)
        for position in range(row.start, row.length)
    ]
    assert other.slots.tolist() == slots
    num_single = 0
    if main.decode is not None and other.decode is not None:
        num_single = main.decode.size
        assert other.decode.lengths.tolist() == main.decode.lengths.tolist()
        for table, own in zip(other.decode.block_table.tolist(), whole, strict=False):
            assert table[: len(own)] == own and not any(table[len(own) :])
    for ours, theirs, own in zip(other.prefills, main.prefills, whole[num_single:], strict=True):
        assert (ours.start, ours.stop, ours.length) == (theirs.start, theirs.stop, theirs.length)
        assert ours.block_ids.tolist() == own


def test_without_blocks_of_their_own_all_layers_have_one_layout() -> None:
    batch, _ = build_batch(random_step(0, 4, 3), block_size=4, device=torch.device("cpu"))
    assert attention_batch(batch).windowed is None and attention_batch(batch).of(7) is batch.attention
