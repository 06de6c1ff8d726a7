"""Collectives over torch.distributed: gloo between CPU ranks, NCCL between CUDA ranks. Knows no model."""

from __future__ import annotations

import atexit
import os
import platform
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shoal.comm.environment import prepare_process_group_environment
from shoal.comm.uneven import gather_uneven
from shoal.errors import RankError

__all__ = ["TorchComm", "connect", "open_store", "torchrun_place", "use_loopback"]


class TorchComm:
    """One rank's end of a process group. See :class:`shoal.comm.base.Comm`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        try:
            dist.all_reduce(tensor, group=self._group)
        except RuntimeError as error:
            raise RankError(f"all_reduce: {error}") from error
        return tensor

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
        def gather(pieces: list[torch.Tensor], mine: torch.Tensor) -> None:
            try:
                dist.all_gather(pieces, mine, group=self._group)
            except RuntimeError as error:
                raise RankError(f"all_gather: {error}") from error

        return gather_uneven(tensor, sizes, dim, self.rank, gather)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        tensor = tensor.contiguous()
        try:
            dist.broadcast(tensor, src=dist.get_global_rank(self._group, source), group=self._group)
        except RuntimeError as error:
            raise RankError(f"broadcast: {error}") from error
        return tensor

    def barrier(self) -> None:
        try:
            dist.barrier(group=self._group)
        except RuntimeError as error:
            raise RankError(f"barrier: {error}") from error

    def set_timeout(self, timeout_s: float) -> None:
        """How long collectives wait for their peers from now on."""
        self._group.set_timeout(timedelta(seconds=timeout_s))

    def close(self) -> None:
        if dist.is_initialized():  # at a program's end the world may have gone first
            dist.destroy_process_group(self._group)


def use_loopback(environment: dict[str, str]) -> None:
    """Have gloo of a process started with ``environment`` talk over loopback: its ranks share this host."""
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if platform.system() == "Darwin" else "lo")


def open_store() -> tuple[TCPStore, str]:
    """A store for one group's ranks to meet at, on a free loopback port.

    Returns:
        the store, which lives as long as it is referenced, and its ``host:port``.
    """
    # Left to itself the store listens on every interface, and it knows no password.
    server = socket.create_server(("127.0.0.1", 0))
    port: int = server.getsockname()[1]
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
    )
    return store, f"127.0.0.1:{port}"


def connect(rank: int, size: int, rendezvous: str, device: torch.device, timeout_s: float) -> TorchComm:
    """Join a group.

    Args:
        rendezvous: ``host:port`` of a store, or empty to use the group that exists (or that
            torchrun's environment describes).
        timeout_s: how long a collective waits for its peers.

    Raises:
        RankError: the peers did not come in time.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    prepare_process_group_environment()
    try:
        if not rendezvous:
            if not dist.is_initialized():
                dist.init_process_group(backend, timeout=timeout)
                # Not sooner: torchrun's store keeps the addresses of a group that was left, and a second
                # engine would find those. Not never: gloo's threads abort a process that ends with them.
                atexit.register(_leave_world)
            return TorchComm(dist.new_group(backend=backend, timeout=timeout))
        host, _, port = rendezvous.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, timeout=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise RankError(f"rank {rank} could not join its group: {error}", rank) from error
    assert dist.group.WORLD is not None
    return TorchComm(dist.group.WORLD)


def _leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def torchrun_place() -> tuple[int, int] | None:
    """(rank, world size) if this process was started by torchrun with more than one rank."""
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return None
