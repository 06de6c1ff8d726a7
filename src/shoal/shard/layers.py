"""Linear layers and embeddings of which a rank holds a slice. Knows no plan and no model.

Each takes over a module of the model in place (:mod:`shoal.shard.mixing`). A column linear needs no
class: with fewer output features it is an ordinary linear; nor does a row linear whose results are summed
later.

Shapes: activations are ``[..., features]``. Weights keep the checkpoint's layout, so ``Conv1D`` is
``[in, out]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from shoal.shard.link import Link
from shoal.shard.mixing import Mixed, take_over

__all__ = [
    "Adopter",
    "GatheredConv1D",
    "GatheredLinear",
    "RowConv1D",
    "RowLinear",
    "VocabEmbedding",
    "set_features",
]


class _Sharded(Mixed):
    """What the layers below have in common."""

    keeps_name = False


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
    vocabulary: int  # rows of the whole table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # As the whole table does on a CPU; elsewhere the question would wait for the device.
        if ids.device.type == "cpu" and bool(((ids < 0) | (ids >= self.vocabulary)).any()):
            raise IndexError(f"a token id is not one of the vocabulary's {self.vocabulary}")
        local = ids - self.start
        is_foreign = (local < 0) | (local >= self.weight.shape[0])
        rows = functional.embedding(local.masked_fill(is_foreign, 0), self.weight)
        return self.comm.all_reduce(rows.masked_fill(is_foreign.unsqueeze(-1), 0))


class Adopter:
    """Turns modules into the layers above for one rank.

    Args:
        link: the rank's end of the group.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    def reduce_outputs(self, module: nn.Module) -> None:
        """Make a linear whose weight holds the rank's input features sum over ranks."""
        take_over(module, RowConv1D if isinstance(module, Conv1D) else RowLinear, self._link)

    def gather_outputs(self, module: nn.Module, sizes: Sequence[int]) -> None:
        """Make a linear whose weight holds the rank's output features gather the others'."""
        kind = GatheredConv1D if isinstance(module, Conv1D) else GatheredLinear
        take_over(module, kind, self._link, sizes=tuple(sizes))

    def split_vocabulary(self, module: nn.Module, start: int, vocabulary: int) -> None:
        """Make an embedding whose table begins at row ``start`` look up the whole vocabulary."""
        take_over(module, VocabEmbedding, self._link, start=start, vocabulary=vocabulary)


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
