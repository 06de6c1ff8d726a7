"""The other ranks compute in the surroundings that rank 0's program has made."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from transformers import BertConfig

from shoal.device.cpu import CpuDevice
from shoal.parallel.surroundings import Hooks, RandomState, RemoteHooks, Settings, autocast, autocast_state


def draw() -> tuple[float, float, float]:
    return float(torch.rand(1)), float(np.random.rand()), random.random()


def test_a_random_state_is_taken_over_in_all_three_generators() -> None:
    state = RandomState.now(CpuDevice())
    drawn = draw()
    assert RandomState.now(CpuDevice()) != state
    state.apply(CpuDevice())
    assert RandomState.now(CpuDevice()) == state and draw() == drawn


def test_autocast_and_the_default_dtype_are_taken_over() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = autocast_state(torch.device("cpu"))
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32
    with autocast(state):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16


def test_changed_settings_are_told_until_they_are_known() -> None:
    config, other = BertConfig(), BertConfig()
    settings = Settings(config)
    assert settings.changes() == {}
    config.output_hidden_states = True
    changes = settings.changes()
    assert changes == settings.changes()
    Settings.apply(other, changes)
    assert other.output_hidden_states is True
    settings.note()
    assert settings.changes() == {}


def test_hooks_are_added_and_removed_as_on_rank_0() -> None:
    ours, theirs = nn.Sequential(nn.Identity()), nn.Sequential(nn.Identity())
    early = ours[0].register_forward_hook(lambda module, args, output: output + 1)
    theirs[0]._forward_hooks[early.id] = ours[0]._forward_hooks[early.id]  # as a pickled model brings it
    hooks, remote = Hooks(ours), RemoteHooks(dict(theirs.named_modules()))

    def tell() -> float:
        remote.apply(hooks.changes())
        hooks.note()
        return float(theirs(torch.zeros(1)))

    assert tell() == 1
    late = ours.register_forward_pre_hook(
        lambda module, args, kwargs: ((args[0] + 4,), kwargs), with_kwargs=True
    )
    assert tell() == 5
    early.remove()
    assert tell() == 4
    late.remove()
    assert tell() == 0
