"""The group of a model under torchrun: every rank runs the same program, and makes the same calls. Knows no
process.

Nothing is announced; what must be the same on all ranks is made sure of: the arguments, by digest, and the
random state, which is rank 0's wherever they differ. So sampling cannot lead ranks apart.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from shoal.comm.base import Comm
from shoal.device.base import Device
from shoal.errors import RankError, UsageError
from shoal.parallel.agree import arguments_digest, digest, share_bytes, which_differ
from shoal.parallel.results import caches_in, empty_caches, refuse_foreign
from shoal.parallel.surroundings import RandomState

__all__ = ["Lockstep"]

_MARK = "_shoal_group"  # of a cache that the group has filled


class Lockstep:
    """One rank's end. See :class:`shoal.parallel.entry.Group`.

    Args:
        comm: of the device computed on.
        control: the same ranks, between CPUs.
        number: of the model in this program, the same on every rank.
    """

    def __init__(self, comm: Comm, control: Comm, device: Device, number: int) -> None:
        self._comm = comm
        self._control = control
        self._device = device
        self._number = number
        self._is_closed = False

    def run(
        self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a module's forward, as every other rank does, without gradients.

        Raises:
            UsageError: ranks were called with different arguments; on every rank.
            RankError: the model was closed, or a rank did not come.
        """
        if self._is_closed:
            raise RankError("the parallel model was closed; load the model again")
        empty_caches((args, kwargs))
        self._check_caches(args, kwargs)
        self._agree(name, args, kwargs)
        with torch.no_grad():
            output = forward(*args, **kwargs)
        for cache in caches_in((args, kwargs, output)):
            vars(cache)[_MARK] = self._number
        return output

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self._comm.close()
            if self._control is not self._comm:
                self._control.close()

    def _check_caches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for cache in caches_in((args, kwargs)):
            if vars(cache).get(_MARK) != self._number:
                refuse_foreign([cache], lambda tensor: False)

    def _agree(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = RandomState.now(self._device)
        calls, states = which_differ(
            self._control, [arguments_digest(name, args, kwargs), digest(pickle.dumps(state))]
        )
        if calls:
            raise UsageError(
                f"{name or 'the model'}: ranks {', '.join(map(str, calls))} were called with other arguments "
                "than rank 0; under torchrun every rank must make the same calls (its own share of the data "
                "is data parallelism)"
            )
        if states:
            told = share_bytes(self._control, pickle.dumps(state) if self._control.rank == 0 else None)
            pickle.loads(told).apply(self._device)
