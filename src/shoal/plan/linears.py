"""What counts as a linear or an embedding, and which dimension of its weight is which. Knows no plan."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

__all__ = [
    "input_dim",
    "input_size",
    "is_linear",
    "is_splittable",
    "output_attribute",
    "output_dim",
    "output_size",
]


def is_linear(module: nn.Module) -> bool:
    """``y = x @ W (+ b)`` over the last dimension, whichever way round the weight is stored."""
    return isinstance(module, (nn.Linear, Conv1D))


def is_splittable(module: nn.Module) -> bool:
    """Whether a rank can hold part of the module's weight and the rest of the model not notice."""
    if isinstance(module, nn.Embedding):
        return module.max_norm is None  # a norm over rows is kept by writing to the table
    return is_linear(module)


def output_dim(module: nn.Module) -> int:
    """Dimension of the weight that runs over output features."""
    return 1 if isinstance(module, (nn.Embedding, Conv1D)) else 0


def input_dim(module: nn.Module) -> int:
    """Dimension of the weight that runs over input features (an embedding's ids)."""
    return 1 - output_dim(module)


def output_size(module: nn.Module) -> int:
    """Number of output features."""
    return int(_weight(module).shape[output_dim(module)])


def input_size(module: nn.Module) -> int:
    """Number of input features, or of ids."""
    return int(_weight(module).shape[input_dim(module)])


def output_attribute(module: nn.Module) -> str:
    """The module's own count of its output features, which its code may read."""
    if isinstance(module, Conv1D):
        return "nf"
    return "embedding_dim" if isinstance(module, nn.Embedding) else "out_features"


def _weight(module: nn.Module) -> nn.Parameter:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    return weight
