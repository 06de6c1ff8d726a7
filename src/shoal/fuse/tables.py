"""A step's rotary tables, copied to where they stay from step to step. Knows no layer and no rotation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["KeptTables", "Tables"]

Tables = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [T, width], in the order the layer takes

_FIRST_ROWS = 64


class KeptTables:
    """Layers mostly share a pair of tables: each pair is kept once."""

    def __init__(self) -> None:
        self._sharing: list[int] = []  # of each layer, the number of its pair, or -1
        self._pairs: list[Tables] = []
        self._of_layers: list[Tables | None] = []

    def keep(self, tables: Sequence[Tables | None]) -> list[Tables | None]:
        """The tables in float32, contiguous, maybe with more rows behind.

        It is the same list of the same tensors from call to call, as long as they have room and the same
        layers share.
        """
        given = list({id(own): own for own in tables if own is not None}.values())
        numbers = {id(own): number for number, own in enumerate(given)}
        sharing = [-1 if own is None else numbers[id(own)] for own in tables]
        if sharing != self._sharing or not all(map(_has_room, self._pairs, given)):
            self._sharing = sharing
            self._pairs = [(_room(cos), _room(sin)) for cos, sin in given]
            self._of_layers = [None if number < 0 else self._pairs[number] for number in sharing]
        for pair, own in zip(self._pairs, given, strict=True):
            for kept, new in zip(pair, own, strict=True):
                kept[: len(new)] = new
        return self._of_layers


def _has_room(pair: Tables, own: Tables) -> bool:
    return all(
        len(kept) >= len(new) and kept.shape[1] == new.shape[1] for kept, new in zip(pair, own, strict=True)
    )


def _room(table: torch.Tensor) -> torch.Tensor:
    rows, width = table.shape
    return torch.empty(max(_FIRST_ROWS, 2 * rows), width)
