"""Messages cross a socket whole, and a closed or silent end is noticed."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from shoal.errors import RankError, UsageError
from shoal.messages import (
    AllocateKV,
    Failure,
    LoadProgress,
    RankReady,
    Shutdown,
    Step,
    StepResult,
    TokenResult,
)
from shoal.worker.channel import Channel
from shoal.worker.executor import gather_replies


@pytest.fixture
def pairs() -> Iterator[list[tuple[Channel, Channel]]]:
    ends = []
    for _ in range(2):
        ours, theirs = socket.socketpair()
        ends.append((Channel(ours), Channel(theirs)))
    yield ends
    for pair in ends:
        for end in pair:
            end.close()


def gone(index: int) -> str:
    return f"rank {index} is gone"


def test_a_message_arrives_as_it_was_sent(pairs: list[tuple[Channel, Channel]]) -> None:
    ours, theirs = pairs[0]
    ours.send(AllocateKV(num_blocks=7, block_size=16))
    ours.send(Shutdown())
    assert theirs.receive(5) == AllocateKV(num_blocks=7, block_size=16)
    assert theirs.receive(5) == Shutdown()


def test_a_message_larger_than_the_socket_buffer_arrives(pairs: list[tuple[Channel, Channel]]) -> None:
    import threading

    ours, theirs = pairs[0]
    big = StepResult(step_id=1, tokens=tuple(TokenResult(sequence_id=i, token_id=i) for i in range(100_000)))
    sender = threading.Thread(target=ours.send, args=(big,))
    sender.start()
    assert theirs.receive(20) == big
    sender.join()


def test_a_closed_end_is_an_end_of_file(pairs: list[tuple[Channel, Channel]]) -> None:
    ours, theirs = pairs[0]
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive(5)


def test_silence_times_out(pairs: list[tuple[Channel, Channel]]) -> None:
    with pytest.raises(TimeoutError):
        pairs[0][1].receive(0.05)


def test_replies_come_in_rank_order_whoever_is_first(pairs: list[tuple[Channel, Channel]]) -> None:
    for rank in (1, 0):
        pairs[rank][1].send(RankReady(rank=rank, kv_bytes=rank))
    replies = gather_replies([ours for ours, _ in pairs], RankReady, 5, gone)
    assert [reply.rank for reply in replies] == [0, 1]


def test_progress_is_summed_over_ranks_and_does_not_count_as_the_answer(
    pairs: list[tuple[Channel, Channel]],
) -> None:
    for rank, (_, theirs) in enumerate(pairs):
        theirs.send(LoadProgress(done=rank + 1, total=4))
        theirs.send(RankReady(rank=rank, kv_bytes=0))
    seen: list[tuple[float, float]] = []
    gather_replies([ours for ours, _ in pairs], RankReady, 5, gone, lambda d, t: seen.append((d, t)))
    assert seen[-1] == (3, 8)


def test_a_rank_that_closes_is_named(pairs: list[tuple[Channel, Channel]]) -> None:
    pairs[0][1].send(RankReady(rank=0, kv_bytes=0))
    pairs[1][1].close()
    with pytest.raises(RankError, match="rank 1 is gone") as caught:
        gather_replies([ours for ours, _ in pairs], RankReady, 5, gone)
    assert caught.value.rank == 1


def test_a_rank_that_does_not_answer_in_time_is_named(pairs: list[tuple[Channel, Channel]]) -> None:
    pairs[0][1].send(RankReady(rank=0, kv_bytes=0))
    with pytest.raises(RankError, match=r"rank 1 did not answer within 0\.05 s"):
        gather_replies([ours for ours, _ in pairs], RankReady, 0.05, gone)


@pytest.mark.parametrize(("usage", "kind"), [(True, UsageError), (False, RankError)])
def test_a_failure_is_raised_as_what_it_was(
    pairs: list[tuple[Channel, Channel]], usage: bool, kind: type[Exception]
) -> None:
    pairs[0][1].send(Failure(rank=0, kind="X", message="model: broken", usage=usage, field="model"))
    pairs[1][1].send(RankReady(rank=1, kv_bytes=0))
    with pytest.raises(kind, match="model: broken"):
        gather_replies([ours for ours, _ in pairs], RankReady, 5, gone)


def test_an_answer_to_something_else_is_refused(pairs: list[tuple[Channel, Channel]]) -> None:
    pairs[0][1].send(Step(step_id=1, sequences=()))
    with pytest.raises(RankError, match="answered with Step"):
        gather_replies([pairs[0][0]], RankReady, 5, gone)
