"""A recognised layer against the layer itself, on random input over pages: prompts and single tokens. Knows
no recipe.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shoal.attention.base import AttentionBatch, DecodeGroup, KVShape, Prefill
from shoal.attention.pages import allocate
from shoal.comm.base import Comm
from shoal.fuse.common import is_linear
from shoal.fuse.record import LayerCall, run_layer
from shoal.fuse.stack import Stack
from shoal.fuse.tables import Tables

__all__ = ["difference", "proof_inputs", "tables_of"]

_BLOCK_SIZE = 4
_SCALES = (0.3, 3.0)  # of the random input


@torch.inference_mode()
def proof_inputs(
    layer: nn.Module, shape: torch.Size, generator: torch.Generator, comm: Comm
) -> list[torch.Tensor]:
    """Hidden states to prove a layer on, the same on every rank.

    Random ones; and some that linears respond to as strongly as they can: a bound that a layer sets its
    queries, say, shows on no other.

    Args:
        layer: float32.
        shape: [1, T, W].
    """
    inputs = [torch.randn(shape, generator=generator) * scale for scale in _SCALES]
    tokens, width = shape[1:]
    strong = torch.randn(shape, generator=generator)
    weights = [_rows(module) for module in layer.modules() if is_linear(module)]
    weights = [weight for weight in weights if weight.shape[1] == width and len(weight)]
    for token in range(tokens if weights else 0):
        weight = weights[token % len(weights)]
        row = weight[int(torch.randint(len(weight), (), generator=generator))]
        strong[0, token] = row / row.square().mean().sqrt().clamp_min(1e-30)
    return [*inputs, comm.broadcast(strong)]


def _rows(module: nn.Module) -> torch.Tensor:
    weight = module.get_parameter("weight")
    return weight.T if isinstance(module, Conv1D) else weight


@torch.inference_mode()
def difference(
    stack: Stack,
    number: int,
    layer: nn.Module,
    call: LayerCall,
    shape: KVShape,
    inputs: Sequence[torch.Tensor],
    is_causal: bool = True,
) -> float:
    """The largest relative error of a stack of one layer, against the layer; infinite where not a number.

    Args:
        number: of the layer's pages.
        layer: float32.
        call: as recorded.
        inputs: hidden states, [1, T, W] each.
        is_causal: whether a token sees what comes before it alone.
    """
    worst = 0.0
    tokens = call.hidden.shape[1]
    for x in inputs:
        own = call.with_hidden(x)
        expected = run_layer(layer, own).out
        pages = allocate([shape], tokens // _BLOCK_SIZE + 2, _BLOCK_SIZE, torch.float32, torch.device("cpu"))
        stack.use_pages({number: pages[0]})
        tables = tables_of(own)
        for start, stop in _spans(tokens, is_causal):
            part = None if tables is None else (tables[0][start:stop], tables[1][start:stop])
            got = stack.run(x[0, start:stop], _batch(start, stop), [part])
            gap = (got - expected[start:stop]).abs().max() / expected.abs().max().clamp_min(1e-30)
            worst = max(worst, float(gap) if torch.isfinite(gap) else float("inf"))
    return worst


def _spans(tokens: int, is_causal: bool) -> list[tuple[int, int]]:
    """Where a token does not see what comes later, all but the last two at once, then one by one."""
    if not is_causal:
        return [(0, tokens)]
    return [(0, tokens - 2), (tokens - 2, tokens - 1), (tokens - 1, tokens)]


def tables_of(call: LayerCall) -> Tables | None:
    """The rotary tables of a call, [T, width] float32, in its order."""
    if not call.tables:
        return None
    first, second = call.kwargs[call.tables]
    return first[0].float(), second[0].float()


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
