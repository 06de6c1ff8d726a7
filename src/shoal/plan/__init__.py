"""How a model is split: measured on its own code, kept as data. Importing it imports no torch."""

from shoal.plan.types import (
    ArgumentSlice,
    KeyValueHeads,
    Patch,
    Plan,
    Region,
    Split,
    TensorSlice,
)

__all__ = ["ArgumentSlice", "KeyValueHeads", "Patch", "Plan", "Region", "Split", "TensorSlice"]
