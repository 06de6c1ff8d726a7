from __future__ import annotations

import pytest
from sched_words import spec

from shoal.sched.intake import Limits, make_branches
from shoal.sched.queue import WaitingQueue
from shoal.sched.request import Request

LIMITS = Limits(max_model_len=10, num_blocks=6, block_size=2)


def arrivals(count: int) -> list[Request]:
    return [make_branches(spec(str(i), [1]), i, LIMITS)[0] for i in range(count)]


def order(queue: WaitingQueue) -> list[int]:
    queue.check_integrity()
    return [queue.popleft().sequence_id for _ in range(len(queue))]


def test_first_come_first_served():
    """And empty at the end."""
    queue = WaitingQueue()
    for request in arrivals(3):
        queue.append(request)
    assert order(queue) == [0, 1, 2]
    with pytest.raises(KeyError):
        queue.popleft()


def test_one_can_be_taken_out_of_the_middle():
    """The others keep their order; taking it twice is an error."""
    requests, queue = arrivals(3), WaitingQueue()
    for request in requests:
        queue.append(request)
    queue.remove(requests[1])
    with pytest.raises(KeyError):
        queue.remove(requests[1])
    assert order(queue) == [0, 2]


def test_who_is_pushed_to_the_front_goes_next():
    """The one that was looked at and did not fit."""
    requests, queue = arrivals(2), WaitingQueue()
    for request in requests:
        queue.append(request)
    queue.push_front(queue.popleft())
    assert order(queue) == [0, 1]


@pytest.mark.parametrize("back", range(4))
def test_who_comes_back_stands_by_arrival(back):
    """Before the younger and behind the older, wherever that is."""
    requests, queue = arrivals(4), WaitingQueue()
    for request in requests:
        if request.sequence_id != back:
            queue.append(request)
    queue.put_back(requests[back])
    assert order(queue) == [0, 1, 2, 3]
