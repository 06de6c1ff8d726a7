"""Where a model folder keeps its weights. Opens nothing and imports no torch, so that asking is quick."""

from __future__ import annotations

from pathlib import Path

__all__ = ["SAFETENSORS", "SAFETENSORS_INDEX", "TORCH", "TORCH_INDEX", "find_weights"]

SAFETENSORS = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"


def find_weights(folder: Path) -> Path | None:
    """The file a folder's weights are in, or the index of its shards; safetensors before pickles.

    The order is transformers': one safetensors file, its shards, one pickle, its shards.
    """
    names = (SAFETENSORS, SAFETENSORS_INDEX, TORCH, TORCH_INDEX)
    return next((folder / name for name in names if (folder / name).is_file()), None)
