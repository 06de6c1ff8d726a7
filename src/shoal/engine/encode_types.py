"""What is asked of an encoder about one text, and what it answers. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["EncodeParams", "Encoding"]


@dataclass(frozen=True, slots=True)
class EncodeParams:
    """What is asked of one text."""

    output: str = "mean"  # as in :class:`shoal.messages.Encode`
    type_ids: tuple[int, ...] = ()  # of the text's tokens; none: all alike
    wanted: tuple[int, ...] = ()  # tokens of the text whose words are wanted
    top_k: int = 0
    follows: bool = False  # another text of its call was let in, and so is this one


@dataclass(frozen=True, slots=True)
class Encoding:
    """What one text got."""

    rows: NDArray[np.float32]  # [1, width] a vector or classes; [tokens, classes]; [wanted, top_k]
    ids: NDArray[np.int32] | None = None  # the words that the numbers of rows belong to
