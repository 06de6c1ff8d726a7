"""The head over a packed weight, and the embedding that shares it read back from there. Knows no layer.

The unpacked weight goes if nobody else reads it: a tied embedding is served from the packed one if all it
does is look rows up, times a factor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shoal.comm.base import Comm
from shoal.cpu_kernels.embed import embed
from shoal.cpu_kernels.layout import pack, unpack
from shoal.cpu_kernels.linear import PackedLinear
from shoal.cpu_kernels.settle import settle
from shoal.fuse.common import agree
from shoal.fuse.match import is_close
from shoal.jit.team import Team
from shoal.shard.layers import GatheredLinear, RowLinear, VocabEmbedding
from shoal.shard.mixing import computes_around

__all__ = ["FusedHead", "fuse_head", "head_storage"]

_ROWS = 5  # of the input that it is proved on
_STORAGES = {"int4": "int8"}  # in 4 bits a head alone costs 4% perplexity


def head_storage(storage: str) -> str:
    """What the head is held in where layers are held in ``storage``; finer, if need be."""
    return _STORAGES.get(storage, storage)


@dataclass(slots=True)
class FusedHead:
    """What was replaced."""

    num_bytes: int = 0  # of the packed weight
    problem: str = ""  # why nothing was
    shares_embedding: bool = False
    _packed: PackedLinear | None = None
    _modules: list[nn.Module] = field(default_factory=list)
    _weight: torch.Tensor | None = None
    _dtype: torch.dtype = torch.float32

    def restore(self) -> None:
        """Put head and embedding back."""
        for module in self._modules:
            vars(module).pop("forward", None)
        if self._packed is not None and self._weight is not None:
            self._weight.data = unpack(self._packed.weight).to(self._dtype)
        self._modules.clear()
        self.num_bytes = 0


@torch.inference_mode()
def fuse_head(model: PreTrainedModel, team: Team, comm: Comm, storage: str) -> FusedHead:
    """Replace the head; all ranks call together, and their heads are of one kind."""
    head = model.get_output_embeddings()
    is_plain = isinstance(head, nn.Linear) and not isinstance(head, RowLinear)
    if not is_plain or computes_around(type(head)) or head._forward_hooks or head._forward_pre_hooks:
        return FusedHead(problem="no plain linear is its head")
    weight = head.weight
    packed = PackedLinear(pack(weight, head.bias, storage), team)
    x = torch.randn(_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    bias = None if head.bias is None else head.bias.float()
    # Weights in fewer bits are other weights: there is nothing to hold them to.
    is_right = storage in ("int8", "int4") or is_close(
        packed(x), nn.functional.linear(x, weight.float(), bias)
    )
    if not agree(comm, "right" if is_right else ""):
        return FusedHead(problem="its packed head gives other numbers")
    settle([packed.weight])
    fused = FusedHead(packed.weight.num_bytes, _packed=packed, _dtype=weight.dtype)
    embedding = model.get_input_embeddings()
    is_tied = getattr(embedding, "weight", None) is weight
    factor = _factor(embedding, weight, comm) if is_tied else None
    if factor is not None:
        embedding.forward = _embedding_forward(embedding, packed, team, comm, factor, weight.dtype)
        fused._modules.append(embedding)
        fused.shares_embedding = True
    head.forward = _head_forward(head, packed, comm)
    fused._modules.append(head)
    readers = {
        module for module in model.modules() if any(p is weight for p in module.parameters(recurse=False))
    }
    if readers <= set(fused._modules):
        fused._weight = weight
        weight.data = weight.new_empty(0)
    return fused


def _factor(embedding: nn.Module, weight: torch.Tensor, comm: Comm) -> float | None:
    """By what an embedding multiplies the rows that it looks up; None if it does something else."""
    if not isinstance(embedding, nn.Embedding):
        return None
    start = embedding.start if isinstance(embedding, VocabEmbedding) else 0
    # Every rank asks for rank 0's first rows: an embedding of a part of the vocabulary sums over ranks.
    ids = torch.arange(min(_ROWS, _rows_of_all(weight, comm)))
    looked_up = embedding(ids)
    mine = weight[ids].float() if start == 0 else torch.zeros(len(ids), weight.shape[1])
    rows = comm.all_reduce(mine) if isinstance(embedding, VocabEmbedding) else mine
    factor = float((looked_up.float() * rows).sum() / rows.square().sum().clamp_min(1e-30))
    tolerance_holds = is_close(rows * factor, looked_up.float()) or weight.dtype is not torch.float32
    return (1.0 if abs(factor - 1) < 1e-6 else factor) if tolerance_holds else None


def _rows_of_all(weight: torch.Tensor, comm: Comm) -> int:
    """Rows that rank 0 has, as far as all ranks can tell: no rank has none."""
    return max(1, len(weight) // max(1, comm.size))


def _head_forward(head: nn.Module, packed: PackedLinear, comm: Comm) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = packed(x.float()).to(x.dtype)
        return comm.all_gather(y, head.sizes) if isinstance(head, GatheredLinear) else y

    return forward


def _embedding_forward(
    embedding: nn.Module, packed: PackedLinear, team: Team, comm: Comm, factor: float, dtype: torch.dtype
) -> Any:
    vocabulary = embedding.vocabulary if isinstance(embedding, VocabEmbedding) else packed.weight.columns
    start = embedding.start if isinstance(embedding, VocabEmbedding) else 0

    def forward(ids: torch.Tensor) -> torch.Tensor:
        if bool(((ids < 0) | (ids >= vocabulary)).any()):
            raise IndexError(f"a token id is not one of the vocabulary's {vocabulary}")
        rows = embed((ids - start).contiguous(), packed.weight, team, factor)
        return (comm.all_reduce(rows) if isinstance(embedding, VocabEmbedding) else rows).to(dtype)

    return forward
