"""What a backward pass needs of a forward pass, kept though the model's code writes over it. Knows no
model.

A recurrent cache is updated in place by the decode step; gradients of the prefill are asked for after that.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["kept_for_backward"]

_MOST_COPIED = 1 << 20  # elements; what is larger is only watched, so that a change is an error


def kept_for_backward() -> torch.autograd.graph.saved_tensors_hooks:
    """While it is active, autograd keeps copies of the tensors it saves.

    A backward pass raises RuntimeError where a tensor too big to be copied was changed in the meantime.
    """
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


def _pack(tensor: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunction():
        if tensor.numel() <= _MOST_COPIED:
            return tensor.detach().clone(), None
        return tensor.detach(), tensor._version


def _unpack(packed: Any) -> torch.Tensor:
    tensor, version = packed
    assert isinstance(tensor, torch.Tensor)
    if version is not None and tensor._version != version:
        raise RuntimeError("a tensor that is needed for gradients has been changed in place")
    return tensor
