"""Messages cross a socket whole, and a closed or silent end is noticed."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from shoal.messages import AllocateKV, Shutdown, StepResult, TokenResult
from shoal.worker.channel import Channel


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


def test_a_peer_that_takes_nothing_in_is_not_waited_for(pairs: list[tuple[Channel, Channel]]) -> None:
    """A stopped process leaves its socket's buffer full."""
    with pytest.raises(TimeoutError):
        pairs[0][0].send_bytes(bytes(8 << 20), 0.05)
