"""What a sentence-transformers folder says of how a text's vector is made: pooling, projections, length.
Reads small files alone; a folder without them leaves the defaults. Knows no engine and no ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import CheckpointError, UnsupportedError
from shoal.model.pooling import MODULES_FILE

__all__ = ["Dense", "PoolingSettings", "read_pooling_settings"]

_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_NAMES = {"cls": "cls", "mean": "mean", "lasttoken": "last"}  # of newer folders' pooling_mode
_ACTIVATIONS: dict[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, np.float32(0)),
}
_LENGTH_FILE = "sentence_*_config.json"


@dataclass(frozen=True, slots=True)
class Dense:
    """A projection of vectors: activation(x weight^T + bias)."""

    weight: NDArray[np.float32]  # [out, in]
    bias: NDArray[np.float32] | None
    activation: str

    def __call__(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """[N, in] to [N, out]."""
        out = rows @ self.weight.T
        return _ACTIVATIONS[self.activation](out if self.bias is None else out + self.bias)


@dataclass(frozen=True, slots=True)
class PoolingSettings:
    """How a text's vector is made of what the model makes of its tokens."""

    pooling: str  # "mean", "cls" or "last"
    normalize: bool = True
    dense: tuple[Dense, ...] = ()
    max_length: int | None = None  # tokens of a text; None: as many as the model takes
    is_lower: bool = False  # text is made lower case first


def read_pooling_settings(folder: Path, default: str) -> PoolingSettings:
    """A folder's own settings.

    Args:
        folder: of the model.
        default: pooling, where the folder has no ``modules.json``; vectors are normalised then.

    Raises:
        UnsupportedError: it asks for a pooling or a module that is not built.
        CheckpointError: its files cannot be read.
    """
    if not (folder / MODULES_FILE).is_file():
        return PoolingSettings(default)
    pooling, normalize, dense = default, False, list[Dense]()
    max_length, is_lower = None, False
    for module in _read(folder / MODULES_FILE):
        path, kind = folder / str(module.get("path", "")), str(module.get("type", "")).rpartition(".")[2]
        if kind == "Transformer":
            for file in sorted(path.glob(_LENGTH_FILE)):
                own = _read(file)
                max_length, is_lower = own.get("max_seq_length"), bool(own.get("do_lower_case"))
        elif kind == "Pooling":
            pooling = _pooling(_read(path / "config.json"), path)
        elif kind == "Dense":
            dense.append(_dense(path))
        elif kind == "Normalize":
            normalize = True
        else:
            raise UnsupportedError(f"model: {MODULES_FILE} has a {kind} module, which is not built", "model")
    return PoolingSettings(pooling, normalize, tuple(dense), max_length, is_lower)


def _pooling(config: Mapping[str, Any], folder: Path) -> str:
    named = config.get("pooling_mode")
    chosen = [named] if isinstance(named, str) else [name for name in config if _is_chosen(config, name)]
    known = [_POOLINGS.get(name) or _NAMES.get(name) for name in chosen]
    if len(known) != 1 or known[0] is None:
        raise UnsupportedError(
            f"model: {folder.name} pools by {' and '.join(map(str, chosen)) or 'nothing'}; there are: "
            f"{', '.join(_POOLINGS)}, one of them",
            field="model",
        )
    return known[0]


def _is_chosen(config: Mapping[str, Any], name: str) -> bool:
    return name.startswith("pooling_mode_") and config[name] is True


def _dense(folder: Path) -> Dense:
    config = _read(folder / "config.json")
    activation = str(config.get("activation_function", "Identity")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(
            f"model: {folder.name}: {activation} is not built; there are: {', '.join(_ACTIVATIONS)}",
            field="model",
        )
    tensors = _tensors(folder)
    return Dense(tensors["linear.weight"], tensors.get("linear.bias"), activation)


def _tensors(folder: Path) -> dict[str, NDArray[np.float32]]:
    """A module's tensors in float32."""
    from shoal.checkpoint.reader import CheckpointReader

    with CheckpointReader(folder) as reader:
        return {name: reader.read(name).float().numpy() for name in reader.names()}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
