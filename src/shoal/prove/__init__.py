"""A plan shown to be right: the production layers on simulated ranks, against the unsharded model.

Called, it is :func:`shoal.model.plans.prove`.
"""

from shoal.callable_package import make_callable
from shoal.prove.prove import plan_and_prove, prove

__all__ = ["plan_and_prove", "prove"]

make_callable(__name__, "shoal.model.plans", "prove")
