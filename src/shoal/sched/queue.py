"""The waiting branches, first come first served. Knows no blocks, no budget and no running branch."""

from __future__ import annotations

from collections import OrderedDict

from shoal.sched.request import Request

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """Branches in order of arrival, by sequence id. Every operation but :meth:`put_back` is O(1)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[int, Request] = OrderedDict()
        self._num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of the branches that wait."""
        return self._num_prompt_tokens

    def append(self, request: Request) -> None:
        """A new arrival, behind all others."""
        self._requests[request.sequence_id] = request
        self._num_prompt_tokens += request.num_input

    def popleft(self) -> Request:
        """Take the first.

        Raises:
            KeyError: nobody waits.
        """
        _sequence_id, request = self._requests.popitem(last=False)
        self._num_prompt_tokens -= request.num_input
        return request

    def push_front(self, request: Request) -> None:
        """Put one before all others."""
        self.append(request)
        self._requests.move_to_end(request.sequence_id, last=False)

    def put_back(self, request: Request) -> None:
        """Put one that ran back in its place by arrival; O(1) per older one that waits.

        Few do: only branches that let others pass while they wait for their leader.
        """
        older = []
        while self._requests and next(iter(self._requests)) < request.sequence_id:
            older.append(self.popleft())
        self.push_front(request)
        for other in reversed(older):
            self.push_front(other)

    def remove(self, request: Request) -> None:
        """Take one out, wherever it stands.

        Raises:
            KeyError: it does not wait.
        """
        del self._requests[request.sequence_id]
        self._num_prompt_tokens -= request.num_input

    def check_integrity(self) -> None:
        """Assert the order of arrival and the counts."""
        sequence_ids = list(self._requests)
        assert sequence_ids == sorted(sequence_ids), "the queue is out of order"
        assert all(key == request.sequence_id for key, request in self._requests.items())
        assert sum(request.num_input for request in self._requests.values()) == self._num_prompt_tokens
