"""What those who recognise and replace have in common. Knows no step."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shoal.comm.base import Comm
from shoal.shard.mixing import computes_around

__all__ = ["UnrecognisedError", "agree", "attempt", "is_linear"]

Made = TypeVar("Made")

# Whatever a model's own code makes of being run in parts: it is left as it is. What ranks raise is
# not among them.
_LEAVES_ALONE = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)


class UnrecognisedError(Exception):
    """A layer does something that there is no step for; the message says what."""


def is_linear(module: nn.Module) -> bool:
    """Whether its output features are products with rows (Conv1D: columns) of its weight, plus its bias."""
    return isinstance(module, (nn.Linear, Conv1D)) and not computes_around(type(module))


def agree(comm: Comm, word: str) -> bool:
    """Whether all ranks say the same, and not nothing. Every rank asks, whatever it found."""
    mine = torch.tensor([zlib.crc32(word.encode()) if word else -1])
    everyone = comm.all_gather(mine, [1] * comm.size, 0)
    return bool(word) and bool((everyone == everyone[0]).all())


def attempt(make: Callable[[], Made]) -> tuple[Made | None, str]:
    """What is made, or why it could not be."""
    try:
        return make(), ""
    except UnrecognisedError as error:
        return None, str(error)
    except _LEAVES_ALONE as error:
        return None, f"{type(error).__name__}: {str(error)[:200]}"
