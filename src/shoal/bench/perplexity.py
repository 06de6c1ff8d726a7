"""Perplexity of a decoder whose weights are held in a storage of the CPU kernels. Knows no engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from shoal.attention.cpu import CpuPaged
from shoal.comm.local import LocalComm
from shoal.errors import UnsupportedError
from shoal.model.choose import serve_causal
from shoal.model.fused import FusedCausal

__all__ = ["perplexity"]


@torch.inference_mode()
def perplexity(path: Path, storage: str, kernel: CpuPaged, texts: Sequence[torch.Tensor]) -> float:
    """Over all texts' tokens but their first ones; each text is read from its beginning.

    Args:
        path: a local model folder, read in float32.
        storage: of packed weights, a name of :data:`shoal.cpu_kernels.layout.STORAGES`.
        texts: token ids, [T] int64 each.

    Raises:
        UnsupportedError: its layers are not fused.
    """
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    chosen = serve_causal(
        module,
        kernel,
        torch.device("cpu"),
        lambda model, paged: FusedCausal(model, paged, kernel, LocalComm(), storage),
    )
    if chosen.model.way != "fused":
        raise UnsupportedError(f"model: its layers are not fused: {'; '.join(chosen.notes)}", field="model")
    total, count = 0.0, 0
    for ids in texts:
        logits = chosen.model.plain(ids, torch.arange(len(ids) - 1))
        total += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
        count += len(ids) - 1
    return math.exp(total / count)
