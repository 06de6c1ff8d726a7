"""A group of its own beside whatever process groups the program has: torch's default group is neither
needed nor made. Knows no model.

:mod:`.torch_dist` serves ranks that are processes of ours, or torchrun's; here rank 0 is the user's own
process, which may have several groups at once and must look to other libraries as it did before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shoal.comm.environment import prepare_process_group_environment
from shoal.comm.uneven import gather_uneven
from shoal.errors import RankError

__all__ = ["PrivateComm", "connect_private"]


class PrivateComm:
    """One rank's end of a private group. See :class:`shoal.comm.base.Comm`."""

    def __init__(self, group: Any) -> None:
        self._group: Any = group
        self.rank: int = group.rank()
        self.size: int = group.size()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        with _named("all_reduce", self.rank):
            self._open().allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
        def gather(pieces: list[torch.Tensor], mine: torch.Tensor) -> None:
            with _named("all_gather", self.rank):
                self._open().allgather([pieces], [mine]).wait()

        return gather_uneven(tensor, sizes, dim, self.rank, gather)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        tensor = tensor.contiguous()
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        with _named("broadcast", self.rank):
            self._open().broadcast([tensor], options).wait()
        return tensor

    def barrier(self) -> None:
        with _named("barrier", self.rank):
            self._open().barrier().wait()

    def close(self) -> None:
        """Leave the group; peers that wait in a collective are released with an error."""
        self._group = None

    def _open(self) -> Any:
        if self._group is None:
            raise RankError("the group of ranks is closed", self.rank)
        return self._group


@contextlib.contextmanager
def _named(collective: str, rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankError(f"{collective}: {error}", rank) from error


def connect_private(
    rank: int, size: int, meeting: TCPStore | str, device: torch.device, timeout_s: float
) -> PrivateComm:
    """Join a group: NCCL between CUDA devices, gloo over loopback otherwise. No environment is read but
    NCCL's own.

    Args:
        meeting: a store (:func:`shoal.comm.torch_dist.open_store`), which the group then keeps alive, or its
            ``host:port``.
        timeout_s: how long the peers may take to come, and later a collective waits for them.

    Raises:
        RankError: the peers did not come in time.
    """
    timeout = timedelta(seconds=timeout_s)
    prepare_process_group_environment(group_exists=False)
    try:
        store = _reach(meeting, timeout) if isinstance(meeting, str) else meeting
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return PrivateComm(dist.ProcessGroupNCCL(store, rank, size, options))
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._timeout = timeout
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return PrivateComm(dist.ProcessGroupGloo(store, rank, size, gloo))
    except (RuntimeError, ValueError) as error:
        raise RankError(f"rank {rank} could not join its group: {error}", rank) from error


def _reach(meeting: str, timeout: timedelta) -> TCPStore:
    host, _, port = meeting.rpartition(":")
    return TCPStore(host, int(port), is_master=False, timeout=timeout)
