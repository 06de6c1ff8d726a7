"""A decoder on the paged way whose layers and head run as our CPU kernels. Knows no layer, no scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from shoal.attention.base import KVShape, LayerPages
from shoal.attention.cpu import CpuPaged
from shoal.attention.pages import allocate
from shoal.comm.base import Comm
from shoal.fuse.head import fuse_head, head_storage
from shoal.fuse.replace import fuse_layers
from shoal.fuse.whole import WholeModel, find_whole
from shoal.model.base import Ragged, Row
from shoal.model.causal import PagedCausal, attention_batch

__all__ = ["FusedCausal"]

_BLOCK_SIZE = 16  # of the pages that :meth:`FusedCausal.plain` makes for itself


class FusedCausal:
    """See :class:`shoal.model.base.ServedModel`.

    Args:
        module: with its weights; its big ones are packed and go.
        paged: the same model on the paged way, which has seen a run.
        kernel: whose team computes.
        storage: of packed weights, a name of :data:`shoal.cpu_kernels.layout.STORAGES`.
    """

    way = "fused"
    keeps_kv = True

    def __init__(
        self, module: PreTrainedModel, paged: PagedCausal, kernel: CpuPaged, comm: Comm, storage: str
    ) -> None:
        self._paged = paged
        self._pages: list[LayerPages] = []
        self._dtype = module.dtype
        self.storage = storage
        self.layers = fuse_layers(module, paged.context, kernel, comm, storage)
        self.head = fuse_head(module, kernel.team, comm, head_storage(storage))
        self._whole: WholeModel | None = None
        self._whole, self._problem = find_whole(
            module, self.layers, paged.context, kernel.team, comm, self.plain
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that are held packed."""
        return self.layers.num_bytes + self.head.num_bytes

    @property
    def computes_alone(self) -> bool:
        """Whether all that is large runs in our kernels, and nothing of it in torch."""
        layers = self.layers
        return layers.num_fused == layers.num_layers and not layers.foreign and not self.head.problem

    @property
    def num_fused(self) -> int:
        """How many of the model's layers are."""
        return self.layers.num_fused

    @property
    def is_rounded(self) -> bool:
        """Whether the weights lose more than the model's dtype takes."""
        return self.storage in ("int8", "int4")

    def restore(self) -> None:
        """Put the model back as it was."""
        self._whole = None
        self.layers.restore()
        self.head.restore()

    @property
    def notes(self) -> tuple[str, ...]:
        """What was fused, and why other parts were not."""
        layers = self.layers
        found = [
            f"{layers.num_fused} of {layers.num_layers} layers fused, {layers.num_stacks} call(s) a step"
        ]
        if layers.foreign:
            found.append(f"within them by the model's own code: {', '.join(layers.foreign)}")
        if self.head.problem:
            found.append(f"head not fused: {self.head.problem}")
        found.append(
            f"code of the model runs between its layers and its head: {self._problem}"
            if self._whole is None
            else "embedding, layers and head run without the model's own code"
        )
        return (*found, *(f"not fused: {problem}" for problem in layers.problems[:1]))

    @property
    def kv_shapes(self) -> Sequence[KVShape]:
        return self._paged.kv_shapes

    def use_pages(self, pages: list[LayerPages]) -> None:
        self._pages = pages
        self._paged.use_pages(pages)
        self.layers.use_pages(pages)

    def plain(self, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        before, blocks = self._pages, -(-len(ids) // _BLOCK_SIZE)
        self.use_pages(allocate(self.kv_shapes, blocks, _BLOCK_SIZE, self._dtype, ids.device))
        positions = torch.arange(len(ids))
        row = Row(0, len(ids), 0, torch.arange(blocks))
        try:
            return self.logits(Ragged(ids, positions, positions, [row], wanted, _BLOCK_SIZE)).clone()
        finally:
            if before:
                self.use_pages(before)

    def logits(self, batch: Ragged) -> torch.Tensor:
        if self._whole is None:
            return self._paged.logits(batch)
        return self._whole(batch.ids, batch.positions, batch.wanted, attention_batch(batch))
