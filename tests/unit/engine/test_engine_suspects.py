"""Of those who were there when ranks failed, the guilty one is found, and nobody else is."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from shoal.cache.manager import SequenceBlocks
from shoal.engine.suspects import Suspects
from shoal.messages import SamplingSpec
from shoal.sched.request import Request, Status


def branch(number: int, request_id: str | None = None) -> Request:
    ids = array("i", [1, 2, 3])
    return Request(
        sequence_id=number,
        request_id=request_id or f"r{number}",
        sampling=SamplingSpec(temperature=0.0),
        token_ids=ids,
        num_prompt=3,
        max_tokens=9,
        eos_ids=frozenset(),
        stop_ids=frozenset(),
        blocks=SequenceBlocks(ids),
    )


def runnable(suspects: Suspects, branches: Sequence[Request]) -> list[Request]:
    trial = suspects.trial
    return [b for b in branches if trial is None or b.request_id in trial]


def find(suspects: Suspects, branches: list[Request], guilty: str) -> tuple[str, int]:
    """Run everybody in rounds; (who is found guilty, how often the ranks failed)."""
    for num_failed in range(1, 30):
        while guilty not in {b.request_id for b in runnable(suspects, branches)}:
            for b in runnable(suspects, branches):
                b.token_ids.append(7)
            suspects.review()
        found = suspects.failed(runnable(suspects, branches))
        if found is not None:
            return found, num_failed
    raise AssertionError("nobody was found")


@pytest.mark.parametrize(("count", "most"), [(1, 3), (2, 4), (24, 8), (256, 11)])
def test_the_guilty_one_is_found_by_halving(count: int, most: int) -> None:
    for seed in range(5):
        branches = [branch(number) for number in range(count)]
        guilty = random.Random(seed).choice(branches).request_id
        suspects = Suspects()
        found, num_failed = find(suspects, branches, guilty)
        assert found == guilty and num_failed <= most
        assert suspects.trial is None and not suspects.has_any


def test_branches_of_one_request_are_one_suspect() -> None:
    branches = [branch(number, "r") for number in range(4)]
    assert find(Suspects(), branches, "r") == ("r", 3)


def test_failures_with_progress_in_between_accuse_nobody() -> None:
    suspects, branches = Suspects(), [branch(number) for number in range(3)]
    for _ in range(9):
        assert suspects.failed(branches) is None
        assert suspects.trial is None
        for b in branches:
            b.token_ids.append(7)
        suspects.review()


def test_who_gets_past_on_trial_is_free_and_the_others_come_next() -> None:
    suspects, branches = Suspects(), [branch(number) for number in range(3)]
    suspects.failed(branches)
    suspects.failed(branches)
    assert suspects.trial == {"r0", "r1"}
    branches[0].token_ids.append(7)
    suspects.review()
    assert suspects.trial == {"r0", "r1"}, "one of them is still there"
    branches[1].status = Status.FINISHED
    suspects.review()
    assert suspects.trial == {"r2"}
    branches[2].token_ids.append(7)
    suspects.review()
    assert suspects.trial is None


def test_a_sibling_that_goes_on_frees_nobody() -> None:
    suspects, branches = Suspects(), [branch(0, "r"), branch(1, "r"), branch(2)]
    suspects.failed(branches)
    branches[0].token_ids.append(7)
    suspects.review()
    suspects.failed(branches)
    assert suspects.trial == {"r"}


def test_a_failure_among_others_starts_over() -> None:
    suspects, branches = Suspects(), [branch(number) for number in range(4)]
    suspects.failed(branches[:2])
    assert suspects.failed(branches[2:]) is None and suspects.trial is None
    suspects.failed(branches[1:])
    assert suspects.trial == {"r2"}
