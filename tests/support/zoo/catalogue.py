"""Every family of the zoo by name. Data only."""

from __future__ import annotations

from support.zoo.decoders import DECODERS
from support.zoo.encoders import ENCODERS
from support.zoo.family import Family
from support.zoo.heads import causal_heads, classifiers
from support.zoo.recent import RECENT
from support.zoo.seq2seq import SEQ2SEQ
from support.zoo.unlisted_decoders import UNLISTED_DECODERS
from support.zoo.unlisted_encoders import UNLISTED_ENCODERS

__all__ = ["CLASSIFIERS", "LISTED", "UNLISTED", "family_of"]

LISTED: dict[str, Family] = dict(sorted({**DECODERS, **ENCODERS, **SEQ2SEQ}.items()))
UNLISTED: dict[str, Family] = dict(
    sorted(
        {
            **UNLISTED_DECODERS,
            **UNLISTED_ENCODERS,
            **RECENT,
            **causal_heads([*LISTED.values(), *UNLISTED_DECODERS.values(), *UNLISTED_ENCODERS.values()]),
        }.items()
    )
)
CLASSIFIERS: dict[str, Family] = dict(sorted(classifiers([*LISTED.values(), *UNLISTED.values()]).items()))
"""Their split is that of the families they are of."""

_ALL = {**LISTED, **UNLISTED, **CLASSIFIERS}


def family_of(name: str) -> Family:
    """A family by its name."""
    return _ALL[name]
