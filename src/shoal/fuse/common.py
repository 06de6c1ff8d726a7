"""What the readers of layers have in common. Knows no step."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

__all__ = ["UnrecognisedError", "is_linear"]


class UnrecognisedError(Exception):
    """A layer does something that there is no step for; the message says what."""


def is_linear(module: nn.Module) -> bool:
    """Whether its output features are products with rows (Conv1D: columns) of its weight, plus its bias."""
    return isinstance(module, (nn.Linear, Conv1D))
