"""A plan shown to be right: the production layers on simulated ranks, against the unsharded model."""

from shoal.prove.prove import plan_and_prove, prove

__all__ = ["plan_and_prove", "prove"]
