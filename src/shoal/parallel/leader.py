"""Rank 0 of a model that this process parallelized: it tells the members what to run, and runs it too.

Only forward passes are shared. Generation, streamers, logits processors, pipelines are the program's own and
run here alone, between them.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shoal.comm.base import Comm
from shoal.device.base import Device
from shoal.errors import RankError, UsageError
from shoal.parallel.crew import Crew
from shoal.parallel.entry import state_names
from shoal.parallel.interrupts import interrupts_wait
from shoal.parallel.packing import Known, pack
from shoal.parallel.parts import Journal, Part
from shoal.parallel.results import CallTensors, empty_caches, refuse_foreign
from shoal.parallel.surroundings import Hooks, RandomState, Settings, autocast_state
from shoal.parallel.unchanged import Unchanged
from shoal.parallel.words import OVER, SKIP, Before, Call, Done, Failed, Go, Ready

__all__ = ["Leader"]

_GRACE_S = 10.0  # how long members may take to be out of a call that failed here

_AGAIN = "its part of the model is lost: load the model again and call shoal.parallelize"


class Leader:
    """The group of one model. See :class:`shoal.parallel.entry.Group`.

    Args:
        model: this rank's part; not kept alive.
        timeout_s: how long a member may take to answer.
        at_close: called once, when the members have gone.
    """

    def __init__(
        self,
        model: nn.Module,
        crew: Crew,
        comm: Comm,
        device: Device,
        timeout_s: float,
        at_close: Callable[[], None],
    ) -> None:
        self._crew = crew
        self._comm = comm
        self._device = device
        self._timeout_s = timeout_s
        self._at_close = at_close
        self._journal = Journal()
        self._known = Known(self._journal)
        self._model = weakref.ref(model)
        self._names = {id(module): name for name, module in model.named_modules()}
        self._modules = {name: weakref.ref(module) for name, module in model.named_modules()}
        self._settings = Settings(getattr(model, "config", None))
        self._hooks = Hooks(model)
        self._unchanged = Unchanged(model)
        self._random: RandomState | None = None  # as the last call left it, on every rank
        self._keep: list[tuple[int, int]] = []  # of the last call's tensors
        self._closed = ""  # why, once it is

    def run(
        self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a module's forward on every rank, without gradients.

        Raises:
            UsageError: an argument cannot be sent, or is another model's; the group stays as it was.
            RankError: a rank is gone, hangs or has failed alone; the group is closed.
            BaseException: what the model's own code raised, on every rank; the group goes on.
        """
        self._check(name)
        with interrupts_wait():
            empty_caches((args, kwargs))
            tensors = CallTensors(self._journal, self._known)
            tensors.check((args, kwargs))
            refuse_foreign((args, kwargs), lambda tensor: isinstance(tensor, Part))
            try:
                self._announce(name, args, kwargs)
                self._known.settle(True)
                args, kwargs = tensors.open((args, kwargs))
                return self._run(name, forward, args, kwargs, tensors)
            except RankError as error:
                self.close(f"{error}; {_AGAIN}")
                raise RankError(self._closed, error.rank) from error

    def close(self, reason: str = "the parallel model was closed; load the model again") -> None:
        """Stop the members. Calls raise from now on. Safe to call twice."""
        if self._closed or not self._crew.is_ours:
            return
        self._closed = reason
        self._journal.close()
        self._comm.close()
        self._crew.stop()
        self._at_close()

    def _check(self, name: str) -> None:
        """Refuse a call that cannot be run."""
        if not self._crew.is_ours:
            raise RankError("a parallel model serves the process that made it, not a fork of it")
        dead = None if self._closed else self._crew.dead()
        if dead is not None:
            self.close(f"{self._crew.obituary(dead)}; {_AGAIN}")
        if self._closed:
            raise RankError(self._closed, dead)
        model, module = self._model(), self._modules[name]()
        if (model is not None and model.training) or (module is not None and module.training):
            raise UsageError("a parallel model only infers: call model.eval() first")
        self._unchanged.check()

    def _announce(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have every member ready to run the call, or nobody."""
        now = RandomState.now(self._device)
        call = Call(
            module=name,
            args=args,
            kwargs=kwargs,
            settings=self._settings.changes(),
            hooks=self._hooks.changes(),
            random=None if now == self._random else now,
            autocast=autocast_state(self._device.torch_device),
        )
        data = self._packed(call)
        before = Before(self._keep, self._journal.take())
        self._keep = []
        self._crew.tell(pack(before, self._device.torch_device), self._timeout_s)
        self._crew.tell(data, self._timeout_s)
        words = self._crew.hear(self._timeout_s)
        for rank, word in words.items():
            if isinstance(word, RankError):
                raise word
            if isinstance(word, Failed):
                self._known.settle(False)
                self._crew.tell(SKIP, self._timeout_s)
                raise UsageError(
                    f"{name or 'the model'}: rank {rank} cannot read the call's arguments: "
                    f"{word.kind}: {word.message}"
                )
            assert isinstance(word, Ready)

    def _packed(self, call: Call) -> bytes:
        device = self._device.torch_device
        try:
            return pack(call, device, self._known, self._names)
        except Exception as error:  # pickling runs the arguments' own code
            self._known.settle(False)
            raise UsageError(
                f"{_culprit(call, device, self._names)} cannot be sent to the other ranks: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _run(
        self,
        name: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: CallTensors,
    ) -> Any:
        self._settings.note()
        self._hooks.note()
        before = RandomState.now(self._device)
        self._crew.tell(pickle.dumps(Go(tensors.exclusive())), self._timeout_s)
        try:
            with torch.no_grad():
                output = forward(*args, **kwargs)
        except BaseException as error:  # Ctrl-C included: the members are in the middle of the call
            tensors.restore(args, kwargs)
            self._after_failure(error)
            raise
        finally:
            self._hooks.note()  # transformers adds some in the middle of a call, on every rank
            self._unchanged.note()
            # Whoever draws may have drawn otherwise than we did: then all are told where to go on.
            self._random = before if RandomState.now(self._device) == before else None
        words = self._crew.hear(self._timeout_s)
        for rank, word in words.items():
            if isinstance(word, Failed):
                raise RankError(f"rank {rank} failed alone: {word.kind}: {word.message}", rank)
            if isinstance(word, RankError):
                raise word
        module = self._modules[name]()
        assert module is not None
        output, self._keep, count = tensors.keep(args, kwargs, output, state_names(module))
        met = {rank: word.num_tensors for rank, word in words.items() if isinstance(word, Done)}
        if any(number != count for number in met.values()):
            raise RankError(f"ranks differ in what {name or 'the model'} gave: {count} tensors, and {met}")
        self._known.settle(True)
        return output

    def _after_failure(self, error: BaseException) -> None:
        """The call failed here. If it is over on every rank, nothing is lost.

        Raises:
            RankError: a rank is gone, or still waits for this one.
        """
        words = self._crew.hear(_GRACE_S)
        failed = [rank for rank, word in words.items() if isinstance(word, Failed)]
        silent = [word for word in words.values() if isinstance(word, RankError)]
        lone = [rank for rank in failed if words[rank].kind != RankError.__name__]
        if not isinstance(error, RankError) and not silent:
            self._crew.tell(OVER, self._timeout_s, failed)
        elif lone:
            word = words[lone[0]]
            raise RankError(f"rank {lone[0]} failed alone: {word.kind}: {word.message}", lone[0]) from error
        elif isinstance(error, RankError):
            raise silent[0] if silent else error
        else:
            said = f"rank 0 failed alone: {type(error).__name__}: {error}"
            raise RankError(f"{said} ({silent[0]})", 0) from error


def _culprit(call: Call, device: torch.device, names: Mapping[int, str]) -> str:
    """Which part of a call cannot be pickled, for people."""
    where = call.module or "the model"
    candidates = [(f"{where}: argument {index}", value) for index, value in enumerate(call.args)]
    candidates += [(f"{where}: argument {key!r}", value) for key, value in call.kwargs.items()]
    candidates += [(f"{change.module or 'the model'}: its forward hook", change) for change in call.hooks]
    candidates += [(f"config.{key}", own) for own in call.settings.values() for key in own]
    for what, value in candidates:
        try:
            pack(value, device, None, names)
        except Exception:  # this is the one
            return what
    return where
