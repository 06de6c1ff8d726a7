"""What those who recognise and replace have in common. Knows no step."""

from __future__ import annotations

import zlib

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shoal.comm.base import Comm

__all__ = ["UnrecognisedError", "agree", "is_linear"]


class UnrecognisedError(Exception):
    """A layer does something that there is no step for; the message says what."""


def is_linear(module: nn.Module) -> bool:
    """Whether its output features are products with rows (Conv1D: columns) of its weight, plus its bias."""
    return isinstance(module, (nn.Linear, Conv1D))


def agree(comm: Comm, word: str) -> bool:
    """Whether all ranks say the same, and not nothing. Every rank asks, whatever it found."""
    mine = torch.tensor([zlib.crc32(word.encode()) if word else -1])
    everyone = comm.all_gather(mine, [1] * comm.size, 0)
    return bool(word) and bool((everyone == everyone[0]).all())
