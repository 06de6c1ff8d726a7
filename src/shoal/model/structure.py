"""Whether a model in memory is still what its class makes of its config. Knows no plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.errors import UnsupportedError
from shoal.plan.skeleton import building

__all__ = ["check_structure"]


def check_structure(model: nn.Module) -> None:
    """Refuse a model that was changed since its class made it: its plan would be another model's.

    Raises:
        UnsupportedError: a module or a parameter is not what the class makes of the config.
    """
    config: Any = model.config
    with building(), torch.device("meta"):
        try:
            made = type(model)(config)
        except Exception as error:  # a class may fail in any way
            raise UnsupportedError(
                f"model: {type(model).__name__} cannot be made from its config alone: "
                f"{type(error).__name__}: {error}",
                field="model",
            ) from error
    theirs = {name: (tuple(p.shape), type(p)) for name, p in made.named_parameters(remove_duplicate=False)}
    ours = {name: (tuple(p.shape), type(p)) for name, p in model.named_parameters(remove_duplicate=False)}
    kinds = {name: type(module) for name, module in made.named_modules()}
    odd = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    odd += [name for name, module in model.named_modules() if kinds.get(name) is not type(module)]
    if odd:
        raise UnsupportedError(
            f"model: {odd[0]} is not what {type(model).__name__} makes of its config (an adapter, or a "
            "module that was exchanged?); merge or undo the change, then try again",
            field="model",
        )
