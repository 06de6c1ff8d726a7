"""How a model is split: measured on its own code, kept as data. Importing it imports no torch.

Called, it is :func:`shoal.model.plans.plan`.
"""

from shoal.callable_package import make_callable
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

make_callable(__name__, "shoal.model.plans", "plan")
