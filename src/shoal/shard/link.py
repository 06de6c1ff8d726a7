"""A rank's end of the group, as modules keep it. Knows no layer and no transport."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shoal.comm.base import Comm
from shoal.errors import PlanError

__all__ = ["Link", "Linked"]


class Link:
    """Holds the group for modules: copies of a module share it, a pickled module leaves it behind."""

    __slots__ = ("_comm",)

    def __init__(self, comm: Comm | None) -> None:
        self._comm = comm

    @property
    def comm(self) -> Comm:
        """The group.

        Raises:
            PlanError: the module was pickled, so that it left its group.
        """
        if self._comm is None:
            raise PlanError("this rank's part of a model left its group when it was pickled: shard again")
        return self._comm

    @contextmanager
    def lent(self, comm: Comm) -> Iterator[None]:
        """Have modules go through another end for a while."""
        own, self._comm = self._comm, comm
        try:
            yield
        finally:
            self._comm = own

    def __deepcopy__(self, memo: dict[int, Any]) -> Link:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Link, (None,)


class Linked(nn.Module):
    """A module that talks to the other ranks."""

    link: Link

    @property
    def comm(self) -> Comm:
        """The group of ranks the module belongs to."""
        return self.link.comm
