"""Linear layers and embeddings of which a rank holds a slice. Knows no plan and no model.

Each takes over a module of the model in place: the module's class becomes one of these mixed with its
own, so that its name, parameters, hooks and further attributes (an embedding's scale) stay. A column
linear needs no class: with fewer output features it is an ordinary linear.

Shapes: activations are ``[..., features]``. Weights keep the checkpoint's layout, so ``Conv1D`` is
``[in, out]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from shoal.comm.base import Comm
from shoal.errors import PlanError

__all__ = [
    "Adopter",
    "GatheredConv1D",
    "GatheredLinear",
    "RowConv1D",
    "RowLinear",
    "VocabEmbedding",
    "set_features",
]


class _Sharded(nn.Module):
    """What the layers below have in common: a rank's end of the group."""

    comm: Comm


class RowLinear(_Sharded):
    """``x @ weight.T`` summed over ranks, plus the whole bias, once."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.comm.all_reduce(functional.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class RowConv1D(_Sharded):
    """``x @ weight`` summed over ranks, plus the whole bias, once."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.comm.all_reduce(torch.matmul(x, self.weight))
        return y if self.bias is None else y + self.bias


class GatheredLinear(_Sharded):
    """A slice of the output features, concatenated with the other ranks'."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    sizes: tuple[int, ...]  # output features a rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.comm.all_gather(functional.linear(x, self.weight, self.bias), self.sizes)


class GatheredConv1D(_Sharded):
    """A slice of the output features, concatenated with the other ranks'."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    sizes: tuple[int, ...]  # output features a rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.matmul(x, self.weight)
        return self.comm.all_gather(y if self.bias is None else y + self.bias, self.sizes)


class VocabEmbedding(_Sharded):
    """Rows ``start`` to ``start + len(weight)`` of an embedding table; foreign ids give zeros to the sum."""

    weight: nn.Parameter
    start: int

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        local = ids - self.start
        is_foreign = (local < 0) | (local >= self.weight.shape[0])
        rows = functional.embedding(local.masked_fill(is_foreign, 0), self.weight)
        return self.comm.all_reduce(rows.masked_fill(is_foreign.unsqueeze(-1), 0))


class Adopter:
    """Turns modules into the layers above for one rank. One class is made per kind of module."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._classes: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}

    def reduce_outputs(self, module: nn.Module) -> None:
        """Make a linear whose weight holds the rank's input features sum over ranks."""
        self._take_over(module, RowConv1D if isinstance(module, Conv1D) else RowLinear)

    def gather_outputs(self, module: nn.Module, sizes: Sequence[int]) -> None:
        """Make a linear whose weight holds the rank's output features gather the others'."""
        kind = GatheredConv1D if isinstance(module, Conv1D) else GatheredLinear
        self._take_over(module, kind, sizes=tuple(sizes))

    def split_vocabulary(self, module: nn.Module, start: int) -> None:
        """Make an embedding whose table begins at row ``start`` look up the whole vocabulary."""
        self._take_over(module, VocabEmbedding, start=start)

    def _take_over(self, module: nn.Module, kind: type[nn.Module], **attributes: Any) -> None:
        own = type(module)
        if issubclass(own, _Sharded):
            raise PlanError(f"a {own.__name__} is sharded already")
        if (own, kind) not in self._classes:
            self._classes[own, kind] = _mixed(own, kind)
        module.__class__ = self._classes[own, kind]
        for name, value in {**attributes, "comm": self._comm}.items():
            setattr(module, name, value)


def _mixed(own: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    """``kind`` mixed into ``own``.

    An embedding subclass (a scale, an offset) computes around ``super().forward()``, so ``kind`` goes
    behind it; the forward of a linear is replaced.
    """
    if issubclass(own, nn.Embedding) and own is not nn.Embedding:
        return type(own.__name__, (own, kind, nn.Embedding), {})
    return type(kind.__name__, (kind, own), {})


def set_features(module: nn.Module) -> None:
    """Bring a module's own counts (``in_features`` ...) in line with its weight's shape.

    For what takes or gives a rank's part; a layer that takes and gives the whole keeps its counts.
    """
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    rows, columns = weight.shape
    if isinstance(module, Conv1D):
        module.nx, module.nf = rows, columns
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = rows, columns
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = rows, columns
