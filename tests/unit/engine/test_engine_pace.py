"""When to come again follows from how long requests have run."""

from __future__ import annotations

from shoal.engine.pace import Pace


def test_those_who_wait_take_their_turns_at_the_places_there_are() -> None:
    pace = Pace()
    for duration_s in (1.0, 3.0):
        pace.ended(duration_s)
    assert pace.seconds_for(num_waiting=40, num_running=8) == 10.0


def test_it_forgets_what_is_long_ago() -> None:
    pace = Pace()
    pace.ended(10_000.0)
    for _ in range(128):
        pace.ended(2.0)
    assert pace.seconds_for(num_waiting=30, num_running=1) == 60.0


def test_it_stays_within_a_second_and_ten_minutes() -> None:
    pace = Pace()
    assert pace.seconds_for(1000, 1) == 1.0  # nothing is known yet
    pace.ended(0.001)
    assert pace.seconds_for(10, 0) == 1.0
    pace.ended(1000.0)
    assert pace.seconds_for(1000, 1) == 600.0
