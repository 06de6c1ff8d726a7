"""The words of many operations in one array, with what changes from step to step settable at once. Knows no
operation.

A word is an int, or a :class:`Slot`: a place that gets a value later, plus an offset. All slots of one key
are set together, by one assignment, however many operations have them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

__all__ = ["Arena", "Slot", "Word"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A word that is ``value of key + offset``."""

    key: Hashable
    offset: int = 0


Word = int | Slot


class Arena:
    """Memory that never moves.

    Args:
        rows: the words of each operation; :meth:`words` gives each its part.
    """

    def __init__(self, rows: Sequence[Sequence[Word]]) -> None:
        flat = [word for row in rows for word in row]
        self._memory: NDArray[numpy.int64] = numpy.zeros(max(1, len(flat)), numpy.int64)
        self._starts = numpy.cumsum([0, *(len(row) for row in rows)]).tolist()
        places: dict[Hashable, list[tuple[int, int]]] = {}
        for place, word in enumerate(flat):
            if isinstance(word, Slot):
                places.setdefault(word.key, []).append((place, word.offset))
            else:
                self._memory[place] = word
        self._places: dict[Hashable, Any] = {
            key: numpy.array(found, numpy.int64).T.copy() for key, found in places.items()
        }

    def words(self, number: int) -> NDArray[numpy.int64]:
        """The words of operation ``number``, a view."""
        return self._memory[self._starts[number] : self._starts[number + 1]]

    def set(self, key: Hashable, value: int) -> None:
        """Give all words of a key their value; none is fine."""
        found = self._places.get(key)
        if found is not None:
            self._memory[found[0]] = found[1] + value

    @property
    def slots(self) -> list[Hashable]:
        """The slots' keys, in the order of their first words."""
        return list(self._places)
