"""The rule of equality: ties are followed on the reference's ids, what is no tie ends the comparison."""

from __future__ import annotations

import math

from shoal.bench.coherence import TIE, Difference, follow, most_that_may_differ


def never(*_: int) -> float:
    raise AssertionError("not to be asked")


def test_equal_ids_ask_for_nothing() -> None:
    assert follow([1, 2, 3], [1, 2, 3], never, never) == []  # type: ignore[arg-type]


def test_after_a_tie_it_goes_on_from_the_references_ids() -> None:
    resumed = []

    def resume(start: int) -> list[int]:
        resumed.append(start)
        return [3, 9][: 4 - start]

    found = follow([1, 2, 3, 4], [1, 7, 8, 8], resume, lambda *_: TIE)
    assert resumed == [2]
    assert [(place.position, place.wanted, place.got) for place in found] == [(1, 2, 7), (3, 4, 9)]
    assert all(place.is_tie for place in found)


def test_what_is_no_tie_ends_it() -> None:
    found = follow([1, 2, 3], [5, 6, 7], never, lambda *_: 2 * TIE)  # type: ignore[arg-type]
    assert found == [Difference(0, 1, 5, 2 * TIE)]
    assert not found[0].is_tie


def test_an_answer_that_ends_early_or_late_is_no_tie() -> None:
    assert follow([1, 2], [1], never, never) == [Difference(1, 2, None, math.inf)]  # type: ignore[arg-type]
    assert follow([1], [1, 2], never, never) == [Difference(1, None, 2, math.inf)]  # type: ignore[arg-type]


def test_one_percent_may_differ() -> None:
    assert [most_that_may_differ(count) for count in (1, 99, 100, 250)] == [0, 0, 1, 2]
