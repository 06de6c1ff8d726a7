"""Layers of an encoder on the packed way that run as our CPU kernels. Knows no layer and no request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from shoal.attention.base import KVShape, LayerPages
from shoal.attention.cpu import CpuPaged
from shoal.attention.pages import allocate
from shoal.comm.base import Comm
from shoal.fuse.replace import fuse_layers
from shoal.model.encoder import PackedEncoder

__all__ = ["FusedEncoder"]

_FIRST_TOKENS = 256  # that there is room for at first


class FusedEncoder:
    """See :class:`shoal.model.choose_encoder.FusedEncoder`.

    Keys and values of a step lie in pages of one position, which all layers of a shape share: nothing of
    them is wanted once a layer is done.

    Args:
        module: with its weights; those of its layers are packed and go.
        packed: the same model on the packed way, not hooked.
        kernel: whose team computes.
        storage: of packed weights, a name of :data:`shoal.cpu_kernels.layout.STORAGES`.
    """

    def __init__(
        self, module: PreTrainedModel, packed: PackedEncoder, kernel: CpuPaged, comm: Comm, storage: str
    ) -> None:
        self._shapes: Sequence[KVShape] = packed.context.shapes
        self._num_tokens = 0
        self._storage = storage
        self._packed = packed
        self.layers = fuse_layers(module, packed.context, kernel, comm, storage, packed.plain)
        packed.before_step = self._reserve

    @property
    def notes(self) -> tuple[str, ...]:
        """What was fused, and why other layers were not."""
        layers = self.layers
        said = [f"{layers.num_fused} of {layers.num_layers} layers fused, {layers.num_stacks} call(s) a step"]
        if layers.foreign:
            said.append(f"within them by the model's own code: {', '.join(layers.foreign)}")
        return (*said, *(f"not fused: {problem}" for problem in layers.problems[:1]))

    @property
    def num_fused(self) -> int:
        """How many layers."""
        return self.layers.num_fused

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that are held packed."""
        return self.layers.num_bytes

    @property
    def computes_alone(self) -> bool:
        """Whether all layers do, with no module of the model's own in between."""
        return self.layers.num_fused == self.layers.num_layers and not self.layers.foreign

    @property
    def is_rounded(self) -> bool:
        """Whether the weights lose more than the model's dtype takes."""
        return self._storage in ("int8", "int4")

    def restore(self) -> None:
        """Put the layers back as they were."""
        self.layers.restore()
        self._packed.before_step = lambda num_tokens: None

    def _reserve(self, num_tokens: int) -> None:
        """Have pages for so many tokens."""
        if num_tokens <= self._num_tokens:
            return
        self._num_tokens = max(num_tokens, 2 * self._num_tokens, _FIRST_TOKENS)
        pages: dict[KVShape, LayerPages] = {}
        for shape in self._shapes:
            if shape not in pages:
                # Float32 whatever the model's dtype: they hold one step, and what reads them computes in it.
                [pages[shape]] = allocate([shape], self._num_tokens, 1, torch.float32, torch.device("cpu"))
        self.layers.use_pages([pages[shape] for shape in self._shapes])
