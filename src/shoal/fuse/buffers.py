"""Memory for a step's values. Knows no layer."""

from __future__ import annotations

import torch

__all__ = ["Buffers"]

_FIRST_ROWS = 64


class Buffers:
    """Rows of values by name, float32, shared by stacks that do not run at once; they only grow."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.version = 0  # counts how often something has moved
        self._widths: dict[str, int] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def want(self, name: str, width: int) -> None:
        """Have a buffer of that name."""
        if self._widths.setdefault(name, width) != width:
            raise ValueError(f"{name} is {self._widths[name]} features wide, not {width}")

    def reserve(self, rows: int) -> None:
        """Make room for so many rows."""
        missing = self._widths.keys() - self._tensors.keys()
        if rows > self.num_rows:
            self.num_rows = max(rows, 2 * self.num_rows, _FIRST_ROWS)
            missing = set(self._widths)
        for name in missing:
            self._tensors[name] = torch.empty(self.num_rows, self._widths[name])
        self.version += bool(missing)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]
