"""How a job gets its arguments: a row of int64 words at an address. Knows no job.

``run_job`` writes them, ``argument`` reads them in the kernel. A float travels as the bits of a float64.
"""

from __future__ import annotations

import ctypes
import struct

import torch

from shoal.cpu_kernels.memory import load_float64, load_int64
from shoal.jit.compile import kernel
from shoal.jit.team import Job, Team

__all__ = ["KernelError", "argument", "argument_float", "float_bits", "output", "rows_of", "run_job"]


@kernel(inline="always")
def argument(arguments: int, position: int) -> int:
    """The int at a position."""
    value: int = load_int64(arguments, position)
    return value


@kernel(inline="always")
def argument_float(arguments: int, position: int) -> float:
    """The float at a position."""
    value: float = load_float64(arguments, position)
    return value


def float_bits(value: float) -> int:
    """A float as a word."""
    bits: int = struct.unpack("q", struct.pack("d", value))[0]
    return bits


class KernelError(RuntimeError):
    """A job gave a status other than 0."""

    def __init__(self, status: int) -> None:
        super().__init__(f"a kernel stopped with status {status}")
        self.status = status


def run_job(team: Team, job: Job, *words: int) -> None:
    """Run a job on the team with these words as its arguments.

    Raises:
        KernelError: the job gave a status other than 0.
    """
    memory = (ctypes.c_int64 * len(words))(*words)
    status = team.run(job, ctypes.addressof(memory))
    if status != 0:
        raise KernelError(status)


def rows_of(tensor: torch.Tensor, width: int, what: str) -> torch.Tensor:
    """[..., width] as rows [M, width] whose elements lie side by side; a copy only if there is no such view.

    Raises:
        TypeError: not float32 on the CPU.
        ValueError: another width.
    """
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        raise TypeError(f"{what}: float32 on the CPU, got {tensor.dtype} on {tensor.device}")
    if tensor.shape[-1] != width:
        raise ValueError(f"{what}: [..., {width}], got {list(tensor.shape)}")
    rows = tensor.reshape(-1, width)
    return rows if rows.stride(1) == 1 or width == 1 else rows.contiguous()


def output(out: torch.Tensor | None, rows: int, width: int) -> torch.Tensor:
    """``out`` if it can be written as rows [M, width], or a new tensor if it is None.

    Raises:
        ValueError: ``out`` is of another dtype or shape, or its elements do not lie side by side.
    """
    if out is None:
        return torch.empty(rows, width)
    fits = out.dtype == torch.float32 and out.shape == (rows, width)
    if not fits or (out.stride(1) != 1 and width != 1):
        raise ValueError(f"out: contiguous float32 [{rows}, {width}], got {out.dtype} {list(out.shape)}")
    return out
