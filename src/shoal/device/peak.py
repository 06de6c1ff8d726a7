"""The most memory something took while it ran: start, run it, read. Knows nothing of what ran.

On CUDA and XPU the figure is the allocator's; elsewhere it is the process's resident peak, which Linux lets
a process start anew. Run on CPUs only so far; the accelerator branch follows torch.cuda's documentation.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from pathlib import Path
from typing import Any

import torch

from shoal.device.memory import peak_rss_bytes

__all__ = ["reset_peak", "trim_heap", "used_since"]


def reset_peak(kind: str) -> int:
    """Start measuring on a device of ``kind``; returns the bytes in use now."""
    backend = _allocator(kind)
    if backend is not None:
        backend.reset_peak_memory_stats()
        return int(backend.memory_allocated())
    clear_refs = Path("/proc/self/clear_refs")
    if clear_refs.exists():
        clear_refs.write_text("5")  # VmHWM starts again at the present size: proc(5)
    return peak_rss_bytes()


def used_since(kind: str, before: int) -> int:
    """Bytes by which the peak since :func:`reset_peak` exceeds what it returned."""
    backend = _allocator(kind)
    peak = int(backend.max_memory_allocated()) if backend is not None else peak_rss_bytes()
    return max(peak - before, 0)


def trim_heap() -> None:
    """Give freed heap memory back to the system, so that what is measured next is what is really held.

    glibc keeps freed memory for later; elsewhere there is nothing to call.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(ctypes.util.find_library("c"))
        if hasattr(libc, "malloc_trim"):  # glibc only
            libc.malloc_trim(0)


def _allocator(kind: str) -> Any:
    return getattr(torch, kind) if kind in ("cuda", "xpu") else None
