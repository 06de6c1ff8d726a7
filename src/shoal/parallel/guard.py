"""What a parallel model must refuse from now on, since it would touch rank 0's part alone. Knows no rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shoal.errors import UnsupportedError

__all__ = ["guard"]

_REFUSALS = {
    "save_pretrained": "a parallel model holds one rank's part, and saving would lose the others'; save it "
    "before shoal.parallelize",
    "resize_token_embeddings": "the vocabulary is dealt to the ranks; resize it before shoal.parallelize",
    "set_attn_implementation": "the ranks' attention is set; choose it before shoal.parallelize",
    "add_adapter": "adapters cannot be added to a parallel model; merge them before shoal.parallelize",
    "load_adapter": "adapters cannot be added to a parallel model; merge them before shoal.parallelize",
    "__deepcopy__": "a parallel model cannot be copied; copy the model before shoal.parallelize",
    "__reduce_ex__": "a parallel model cannot be pickled; pickle the model before shoal.parallelize",
}


def guard(model: nn.Module) -> None:
    """Have the model refuse what would change or lose parts of it: saving, copying, casting, moving.

    ``state_dict`` stays: it has this rank's part.
    """
    for name, reason in _REFUSALS.items():
        if name.startswith("__") or hasattr(model, name):
            vars(model)[name] = _refusal(name, reason)
    vars(model)["_apply"] = _unchanging_apply(weakref.ref(model))
    if hasattr(model, "_valid_auto_compile_criteria"):
        # generate() would compile the forward, and with it the way to the other ranks.
        vars(model)["_valid_auto_compile_criteria"] = _never


def _never(*args: Any, **kwargs: Any) -> bool:
    return False


def _refusal(name: str, reason: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(f"{name.strip('_')}: {reason}")

    return refuse


def _unchanging_apply(this: weakref.ref[nn.Module]) -> Callable[..., nn.Module]:
    """For ``to``, ``half``, ``cuda`` and so on: nothing to do is done; anything else is refused."""

    def apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        model = this()
        assert model is not None
        for dtype, device in {(t.dtype, t.device) for t in (*model.parameters(), *model.buffers())}:
            probe = fn(torch.empty(0, dtype=dtype, device=device))
            if (probe.dtype, probe.device) != (dtype, device):
                raise UnsupportedError(
                    f"a parallel model stays on {device} in {dtype}: pass device= and dtype= to "
                    "shoal.parallelize"
                )
        return model

    return apply
