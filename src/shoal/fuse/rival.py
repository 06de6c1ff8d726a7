"""Whether our linears are as fast as torch's (oneDNN, MKL) on this processor, measured. Knows no model.

Where a processor has matrix instructions that our vectors don't use (AMX in bfloat16, SME), torch may be the
better choice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from shoal.comm.base import Comm
from shoal.cpu_kernels.layout import pack
from shoal.cpu_kernels.linear import PackedLinear
from shoal.jit.team import Team

__all__ = ["Race", "race"]

_ROWS = (1, 64)  # one request decodes; prompts, or many requests
_FEATURES = 1024  # each way: four MiB in float32, which no cache near the core holds
_ROUNDS = 7
# Around a product torch needs some microseconds that a fused layer does not, and fusing saves whole passes.
_MOST = 1.5


@dataclass(frozen=True, slots=True)
class Race:
    """Torch's seconds over ours for each number of rows: above one, ours are faster."""

    ratios: dict[int, float]

    @property
    def is_won(self) -> bool:
        """Whether ours, over few and many rows together, are not much slower."""
        return math.prod(self.ratios.values()) ** (1 / len(self.ratios)) * _MOST >= 1

    def __str__(self) -> str:
        found = ", ".join(f"{ratio:.2f} at {rows} row(s)" for rows, ratio in self.ratios.items())
        return f"speed of our linears over torch's: {found}"


@torch.inference_mode()
def race(dtype: torch.dtype, comm: Comm) -> Race:
    """Time a linear of ours against torch's, each on one thread: it is the processor that is asked about.

    All ranks call together, and get the slowest rank's ratios.

    Args:
        dtype: float32 or bfloat16, of the weights on both sides and of torch's activations.
    """
    weight = torch.randn(_FEATURES, _FEATURES, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours = PackedLinear(pack(weight, None, "bfloat16" if dtype is torch.bfloat16 else "float32"), Team(1))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ratios = [_ratio(ours, weight, torch.ones(rows, _FEATURES)) for rows in _ROWS]
    finally:
        torch.set_num_threads(threads)
    everyone = comm.all_gather(torch.tensor([ratios]), [1] * comm.size, 0)
    return Race(dict(zip(_ROWS, everyone.amin(0).tolist(), strict=True)))


def _ratio(ours: PackedLinear, weight: torch.Tensor, x: torch.Tensor) -> float:
    cast = x.to(weight.dtype)
    return _least_seconds(lambda: functional.linear(cast, weight)) / _least_seconds(lambda: ours(x))


def _least_seconds(run: Callable[[], object]) -> float:
    """Of this thread's own time, once warmed up: others may use the machine."""
    run()
    seconds = []
    for _ in range(_ROUNDS):
        started = time.thread_time()
        run()
        seconds.append(time.thread_time() - started)
    return min(seconds)
