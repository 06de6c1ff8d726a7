"""A recognised layer against the layer itself, on random input over pages: prompts and single tokens. Knows no
recipe.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shoal.attention.base import AttentionBatch, DecodeGroup, KVShape, Prefill
from shoal.attention.pages import allocate
from shoal.fuse.record import LayerCall, run_layer
from shoal.fuse.stack import Stack, Tables

__all__ = ["difference", "tables_of"]

_BLOCK_SIZE = 4
_SCALES = (0.3, 3.0)  # of the random input


@torch.inference_mode()
def difference(
    stack: Stack, number: int, layer: nn.Module, call: LayerCall, shape: KVShape, generator: torch.Generator
) -> float:
    """The largest relative error of a stack of one layer, against the layer; infinite where not a number.

    Args:
        number: of the layer's pages.
        layer: float32.
        call: as recorded; its hidden states are replaced.
    """
    worst = 0.0
    tokens = call.hidden.shape[1]
    for scale in _SCALES:
        x = torch.randn(call.hidden.shape, generator=generator) * scale
        own = call.with_hidden(x)
        expected = run_layer(layer, own).out
        pages = allocate([shape], tokens // _BLOCK_SIZE + 2, _BLOCK_SIZE, torch.float32, torch.device("cpu"))
        stack.use_pages({number: pages[0]})
        tables = tables_of(own)
        # All but the last two tokens at once, then one by one.
        for start, stop in ((0, tokens - 2), (tokens - 2, tokens - 1), (tokens - 1, tokens)):
            part = None if tables is None else (tables[0][start:stop], tables[1][start:stop])
            got = stack.run(x[0, start:stop], _batch(start, stop), [part])
            gap = (got - expected[start:stop]).abs().max() / expected.abs().max().clamp_min(1e-30)
            worst = max(worst, float(gap) if torch.isfinite(gap) else float("inf"))
    return worst


def tables_of(call: LayerCall) -> Tables | None:
    """The rotary tables of a call, [T, width] float32."""
    if not call.tables:
        return None
    cos, sin = call.kwargs[call.tables]
    return cos[0].float(), sin[0].float()


def _batch(start: int, stop: int) -> AttentionBatch:
    """Tokens of one sequence, its blocks from the last one down."""
    count = -(-stop // _BLOCK_SIZE)
    blocks = torch.arange(count, 0, -1)
    at = torch.arange(start, stop)
    slots = blocks[at // _BLOCK_SIZE] * _BLOCK_SIZE + at % _BLOCK_SIZE
    if stop - start == 1:
        return AttentionBatch(slots, DecodeGroup(blocks[None], torch.tensor([stop])), [])
    prefills: Sequence[Prefill] = [Prefill(0, stop - start, blocks, stop)]
    return AttentionBatch(slots, None, list(prefills))
