"""Which request makes the ranks fail. Knows no ranks and no error: it is told who was in flight when they
failed, and says who may run next.

One failure proves nothing: whoever was in flight is a suspect until it has got past where it was. Those who
were there when the ranks failed a second time are run apart, half of them at a time, and whose failure it
is when it runs alone is guilty. So nobody is given up who did not fail three times without a step forward,
the last time with nobody else about: ranks that are killed from outside make no one guilty.
"""

from __future__ import annotations

from collections.abc import Collection

from shoal.sched.request import Request, Status

__all__ = ["Suspects"]


class Suspects:
    """The branches under suspicion, and those of their requests that are on trial."""

    def __init__(self) -> None:
        self._points: dict[Request, int] = {}  # the tokens each had when the ranks failed
        self._trial: frozenset[str] | None = None

    @property
    def has_any(self) -> bool:
        """Somebody is under suspicion."""
        return bool(self._points)

    @property
    def trial(self) -> frozenset[str] | None:
        """The requests that alone may run; None: all."""
        return self._trial

    def failed(self, in_flight: Collection[Request]) -> str | None:
        """The ranks have failed with these branches in flight.

        Returns:
            the request that is guilty of it, if that is certain now.
        """
        again = {request: point for request, point in self._points.items() if request in in_flight}
        if not again:
            self._points = {request: request.num_tokens for request in in_flight}
            self._trial = None
            return None
        self._points = again
        request_ids = self._request_ids()
        if self._trial is not None and len(request_ids) == 1:
            self._points, self._trial = {}, None
            return request_ids[0]
        self._trial = _half(request_ids)
        return None

    def review(self) -> None:
        """After steps and aborts: acquit who has ended, or got past where the ranks failed."""
        if not self._points:
            return
        self._points = {
            request: point
            for request, point in self._points.items()
            if request.status is not Status.FINISHED and request.num_tokens <= point
        }
        if self._trial is not None and self._trial.isdisjoint(request_ids := self._request_ids()):
            self._trial = _half(request_ids) if request_ids else None

    def _request_ids(self) -> list[str]:
        """In order of arrival."""
        ordered = sorted(self._points, key=lambda request: request.sequence_id)
        return list(dict.fromkeys(request.request_id for request in ordered))


def _half(request_ids: list[str]) -> frozenset[str]:
    return frozenset(request_ids[: (len(request_ids) + 1) // 2])
