"""Compiles what fused layers run, before anything is measured. Knows no layer.

Compiling takes memory that no weight takes, and seconds in which other ranks would wait in a collective.
"""

from __future__ import annotations

from shoal.comm.base import Comm
from shoal.cpu_kernels.attention import attend_items, merge_items
from shoal.cpu_kernels.combine import combine_job
from shoal.cpu_kernels.embed import embed_job
from shoal.cpu_kernels.layout import STORAGES
from shoal.cpu_kernels.linear import linear_job
from shoal.cpu_kernels.microkernel import multiply_address
from shoal.cpu_kernels.mlp import gated_job
from shoal.cpu_kernels.norm import head_norm_job, norm_job
from shoal.cpu_kernels.program import program_job
from shoal.cpu_kernels.rotary import rotary_job
from shoal.jit.cache import compiling
from shoal.jit.team import job_address

__all__ = ["compile_jobs"]

_JOBS = (
    linear_job, gated_job, norm_job, head_norm_job, combine_job, rotary_job, attend_items, merge_items,
    embed_job, program_job,
)  # fmt: skip


def compile_jobs(storage: str, comm: Comm) -> None:
    """Have every kernel ready that a model of this storage may need: one rank compiles, the others read."""
    with compiling():
        for job in _JOBS:
            job_address(job)
        for name in dict.fromkeys(("float32", storage)):
            multiply_address(STORAGES[name])
        if getattr(comm, "state_address", 0):
            from shoal.fuse.collective import collect_job, post_job, sum_job

            for job in (sum_job, post_job, collect_job):
                job_address(job)
