"""A step becomes a batch whose every token stands where its position says."""

from __future__ import annotations

import torch

from shoal.messages import SamplingSpec, SequenceStep, Step, pack_ids
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
