"""What one step sampled, the next one computes: on every rank, and for one step only."""

from __future__ import annotations

import pytest
import torch

from shoal.comm.local import LocalComm
from shoal.comm.simulated import SimulatedComm, run_ranks
from shoal.errors import EngineError
from shoal.messages import (
    PLACEHOLDER_ID,
    SamplingSpec,
    SequenceStep,
    Step,
    TokenResult,
    pack_ids,
    unpack_ids,
)
from shoal.worker.placeholders import Placeholders

CPU = torch.device("cpu")


def share(sequence_id: int, token_id: int, history: tuple[int, ...] = ()) -> SequenceStep:
    return SequenceStep(
        sequence_id=sequence_id,
        start=5,
        token_ids=pack_ids([token_id]),
        block_ids=pack_ids([0, 1]),
        sampling=SamplingSpec(temperature=0.0, presence_penalty=0.5 if history else 0.0),
        history=pack_ids(history),
    )


def step(*shares: SequenceStep) -> Step:
    return Step(step_id=1, sequences=shares)


def results(ids: dict[int, int]) -> list[TokenResult]:
    return [TokenResult(sequence_id=sequence_id, token_id=token_id) for sequence_id, token_id in ids.items()]


@pytest.mark.parametrize("samples", [0, 2])
def test_the_sampling_rank_tells_the_others(samples: int) -> None:
    def body(comm: SimulatedComm) -> list[int]:
        placeholders = Placeholders(comm, samples, CPU)
        if comm.rank == samples:
            placeholders.keep(results({7: 70, 8: 80, 9: 90}))
        return placeholders.ids(step(share(9, PLACEHOLDER_ID), share(8, 1), share(7, PLACEHOLDER_ID)))

    assert run_ranks(3, body) == [[90, 70]] * 3


def test_a_step_without_placeholders_is_no_collective() -> None:
    """One rank alone may ask; with a placeholder it would wait for its peer."""

    def body(comm: SimulatedComm) -> list[int]:
        return Placeholders(comm, 0, CPU).ids(step(share(1, 5))) if comm.rank else []

    assert run_ranks(2, body, timeout_s=5) == [[], []]


def test_ids_are_kept_for_one_step_only() -> None:
    placeholders = Placeholders(LocalComm(), 0, CPU)
    placeholders.keep(results({1: 10}))
    placeholders.keep(results({2: 20}))
    assert placeholders.ids(step(share(2, PLACEHOLDER_ID))) == [20]
    with pytest.raises(EngineError, match="sequence 1"):
        placeholders.ids(step(share(1, PLACEHOLDER_ID)))


def test_a_sequence_that_failed_computes_some_token() -> None:
    placeholders = Placeholders(LocalComm(), 0, CPU)
    placeholders.keep([TokenResult(sequence_id=1, error="no logits")])
    assert placeholders.ids(step(share(1, PLACEHOLDER_ID))) == [0]


def test_a_history_ends_in_the_id_that_was_sampled() -> None:
    """Where there is a history; the others are left as they are."""
    placeholders = Placeholders(LocalComm(), 0, CPU)
    placeholders.keep(results({1: 10, 2: 20}))
    waiting = share(1, PLACEHOLDER_ID, (3, 4, PLACEHOLDER_ID))
    plain, known = share(2, PLACEHOLDER_ID), share(3, 6, (5, 6))
    completed, *others = placeholders.in_histories([waiting, plain, known])
    assert list(unpack_ids(completed.history)) == [3, 4, 10]
    assert others[0] is plain and others[1] is known
