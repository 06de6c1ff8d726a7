"""Ranks that torchrun started make sure that they do the same: small things told to all, and digests
compared. Knows no model.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from shoal.comm.base import Comm
from shoal.parallel.walk import walk

__all__ = ["arguments_digest", "share_bytes", "weights_digest", "which_differ"]

_SAMPLES = 1024  # values of a large tensor that its digest looks at


def share_bytes(comm: Comm, data: bytes | None) -> bytes:
    """Rank 0's ``data`` on every rank; the others' is not looked at."""
    size = comm.broadcast(torch.tensor([len(data or b"")], dtype=torch.int64))
    values = torch.zeros(int(size), dtype=torch.uint8)
    if comm.rank == 0 and data:
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return bytes(comm.broadcast(values).numpy().tobytes()) if int(size) else b""


def which_differ(comm: Comm, digests: list[bytes]) -> list[list[int]]:
    """For each digest (16 bytes), the ranks whose own differs from rank 0's; the same on every rank."""
    mine = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.int64)[None]
    everyone = comm.all_gather(mine, [1] * comm.size, 0).reshape(comm.size, len(digests), 2)
    return [
        [rank for rank in range(comm.size) if not torch.equal(everyone[rank, index], everyone[0, index])]
        for index in range(len(digests))
    ]


def digest(*parts: bytes) -> bytes:
    """16 bytes that stand for ``parts``."""
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()


def arguments_digest(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Of a call: the module, and its arguments' tensors outside caches (large ones by samples)."""
    parts = [name.encode()]

    def visit(tensor: torch.Tensor, is_state: bool) -> torch.Tensor:
        if not is_state:
            parts.append(_tensor_digest(tensor))
        return tensor

    walk((args, dict(kwargs)), visit)
    return digest(*parts)


def weights_digest(tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """Of a model's weights, by samples."""
    return digest(*(part for name, tensor in tensors for part in (name.encode(), _tensor_digest(tensor))))


def _tensor_digest(tensor: torch.Tensor) -> bytes:
    described = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    if tensor.is_meta or tensor.layout is not torch.strided:
        return described
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // _SAMPLES)
    sample = flat[::step].cpu().contiguous()
    return described + (sample.view(torch.uint8).numpy().tobytes() if sample.numel() else b"")
