"""Every family of the zoo by name. Data only."""

from __future__ import annotations

from support.zoo.decoders import DECODERS
from support.zoo.encoders import ENCODERS
from support.zoo.family import Family
from support.zoo.seq2seq import SEQ2SEQ
from support.zoo.unlisted_decoders import UNLISTED_DECODERS
from support.zoo.unlisted_encoders import UNLISTED_ENCODERS

__all__ = ["LISTED", "UNLISTED", "family_of"]

LISTED: dict[str, Family] = dict(sorted({**DECODERS, **ENCODERS, **SEQ2SEQ}.items()))
UNLISTED: dict[str, Family] = dict(sorted({**UNLISTED_DECODERS, **UNLISTED_ENCODERS}.items()))


def family_of(name: str) -> Family:
    """A family by its name, listed or not."""
    return LISTED[name] if name in LISTED else UNLISTED[name]
