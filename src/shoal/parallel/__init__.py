"""``shoal.parallelize``: a transformers model over several ranks that looks the same from outside.

Importing it imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.parallel.api import close, parallelize, parallelized

__all__ = ["close", "parallelize", "parallelized"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("shoal.parallel.api"), name)
    raise AttributeError(f"module 'shoal.parallel' has no attribute {name!r}")
