"""A model on the paged way through ``torch.compile``, or put back. Knows no kernel and proves nothing.

Attention stays as it is: the graph is cut there, since what it works on (pages, block tables) is no argument
of the model's. So do layers that meet other ranks. The parts between are compiled, once for all layers that
are alike.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from shoal.model.causal import PagedCausal
from shoal.shard.link import Linked

__all__ = ["CompiledModel"]


class CompiledModel:
    """``module`` compiled in place, at its first call.

    Args:
        module: the model.
        model: what serves it.
    """

    def __init__(self, module: PreTrainedModel, model: PagedCausal) -> None:
        import torch.compiler  # brings the compiler's front end in

        self._module = module
        self._uncompiled: list[tuple[Any, str]] = [(model.context, "attend")]
        self._uncompiled += [(part, "forward") for part in module.modules() if isinstance(part, Linked)]
        for owner, name in self._uncompiled:
            setattr(owner, name, torch.compiler.disable(getattr(owner, name)))  # type: ignore[no-untyped-call]
        module.compile(dynamic=True)

    def restore(self) -> None:
        """Put the model's own code back."""
        for owner, name in self._uncompiled:
            del owner.__dict__[name]
        self._module._compiled_call_impl = None
