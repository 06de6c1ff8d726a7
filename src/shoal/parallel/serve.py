"""A member's life: its part of the model, then calls, until the channel closes. Knows no program."""

from __future__ import annotations

import pickle
import sys
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shoal.comm.base import Comm
from shoal.comm.choose import join_private_group
from shoal.device.base import Device, resolve_device
from shoal.device.peak import trim_heap
from shoal.parallel.build import Recipe, build_part
from shoal.parallel.entry import Calls, adopt, hook_keys, state_names
from shoal.parallel.packing import unpack
from shoal.parallel.parts import replay
from shoal.parallel.results import count_tensors
from shoal.parallel.surroundings import RemoteHooks, Settings, autocast
from shoal.parallel.transfer import fill, unpack_skeleton
from shoal.parallel.words import OVER, SKIP, Before, Begin, Call, Done, Failed, Go, Ready
from shoal.plan.skeleton import building
from shoal.plan.slices import zero_names
from shoal.plan.types import Plan
from shoal.process.frames import Frames
from shoal.shard import shard

__all__ = ["serve"]

_OVER_S = 5.0  # how long a member that failed waits to hear that all ranks did

Place = tuple[tuple[str, ...], torch.dtype]


def serve(frames: Frames) -> None:
    """Answer the leader until it closes the channel, or the ranks are out of step."""
    try:
        member = _begin(frames)
        while member.serve_call(frames):
            pass
    except EOFError:
        return
    except Exception as error:  # the process boundary: everything is reported, then it ends
        try:
            _say(frames, _failed(error))
        except OSError:
            return  # nobody is left to report to


def _say(frames: Frames, word: Any) -> None:
    frames.send_bytes(pickle.dumps(word))


def _failed(error: BaseException) -> Failed:
    return Failed(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


def _begin(frames: Frames) -> _Member:
    begin: Begin = pickle.loads(frames.receive_bytes())
    sys.path[:] = [*begin.sys_path, *(entry for entry in sys.path if entry not in begin.sys_path)]
    device = resolve_device(begin.device)
    device.activate()
    torch.set_num_threads(begin.num_threads)
    _say(frames, Ready())
    comm = join_private_group(
        begin.rank, begin.size, begin.rendezvous, device.torch_device, begin.timeout_s, begin.comm
    )
    plan = Plan.from_dict(begin.plan)
    calls = Calls()
    source = unpack(frames.receive_bytes(), device.torch_device)
    if isinstance(source, Recipe):
        model: nn.Module = build_part(source, plan, comm, device, calls)
    else:
        model = _receive(frames, source, plan, comm, device, calls)
    trim_heap()
    _say(frames, Ready())
    return _Member(model, device)


def _receive(
    frames: Frames, places: Sequence[Place], plan: Plan, comm: Comm, device: Device, calls: Calls
) -> nn.Module:
    """The leader's model, cut to this rank's part before its values come."""
    model = unpack_skeleton(frames.receive_bytes(), device.torch_device)
    with building(), torch.device("meta"):
        type(model)(model.config)  # for what constructors note in their libraries, and pickles do not carry
    zeros = zero_names(plan, model, comm.rank)
    hooks = hook_keys(model)
    shard(model, plan, comm.rank, comm)
    adopt(model, plan, calls, hooks)
    _say(frames, Ready())
    fill(frames, model, places, zeros, device.torch_device)
    return model


@dataclass
class _Member:
    """The model's part, and the tensors that the leader knows by number."""

    model: nn.Module
    device: Device
    _store: dict[int, torch.Tensor] = field(default_factory=dict)
    _met: list[torch.Tensor] = field(default_factory=list)  # in the last call, until the next begins

    def __post_init__(self) -> None:
        self._modules = dict(self.model.named_modules())
        self._hooks = RemoteHooks(self._modules)

    def serve_call(self, frames: Frames) -> bool:
        """One call; False if the leader has gone, or this rank is out of step."""
        before: Before = self._unpack(frames.receive_bytes())
        self._catch_up(before)
        data = frames.receive_bytes()
        try:
            call: Call = self._unpack(data)
        except Exception as error:  # a class that is not found here, or whatever its own code raises
            _say(frames, _failed(error))
            return bytes(frames.receive_bytes()) == SKIP
        del data
        _say(frames, Ready())
        word = bytes(frames.receive_bytes())
        if word == SKIP:
            return True
        go: Go = pickle.loads(word)
        try:
            num_tensors = self._run(call, go)
        except Exception as error:  # model code raises what it likes; rank 0 decides what comes of it
            _say(frames, _failed(error))
            try:
                return bytes(frames.receive_bytes(_OVER_S)) == OVER
            except TimeoutError:
                return False  # rank 0 waits for us in a collective: our end releases it
        _say(frames, Done(num_tensors))
        return True

    def _unpack(self, data: bytes | bytearray) -> Any:
        return unpack(data, self.device.torch_device, self._store, self._modules)

    def _catch_up(self, before: Before) -> None:
        for position, number in before.keep:
            self._store[number] = self._met[position]
        self._met = []
        replay(before.journal, self._store)

    @torch.no_grad()
    def _run(self, call: Call, go: Go) -> int:
        module = self._modules[call.module]
        Settings.apply(getattr(self.model, "config", None), call.settings)
        self._hooks.apply(call.hooks)
        if call.random is not None:
            call.random.apply(self.device)
        # Held by the call's arguments alone, so that what the model replaces goes at once.
        lent = {number: weakref.ref(self._store.pop(number)) for number in go.exclusive}
        try:
            with autocast(call.autocast):
                output = module.forward(*call.args, **call.kwargs)
            self._met = count_tensors(call.args, call.kwargs, output, state_names(module))
        finally:
            for number, ref in lent.items():
                tensor = ref()
                if tensor is not None:
                    self._store[number] = tensor
        return len(self._met)
