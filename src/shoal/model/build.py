"""Builds transformers' own module without weights: big tensors on meta, rotary tables and the like real.
Knows no plan and no checkpoint; whoever calls it shards and loads.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from shoal.errors import ModelNotFoundError, UnsupportedError

__all__ = ["build_empty", "causal_class", "load_config", "model_length"]

# Creators whose values nobody reads before weights are loaded, and the size from which they go to meta.
# What is smaller, or made any other way (arange, ones, tril ...), is real: rotary tables, masks, norms.
_EMPTY = {torch.empty, torch.randn, torch.rand, torch.zeros}
_SMALL = 1 << 12
_RANDOM_FILL = {"normal_", "uniform_", "bernoulli_", "exponential_", "trunc_normal_", "random_"}


class _BigOnMeta(TorchFunctionMode):
    """Uninitialised tensors of some size are created on meta. Per thread, like any such mode."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _RANDOM_FILL:
            return args[0] if args else kwargs["tensor"]  # slow, soon overwritten, and not ours to draw
        if func in _EMPTY and self._numel(args, kwargs) >= _SMALL:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)

    @staticmethod
    def _numel(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        shape = kwargs.get("size", args)
        if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
            shape = shape[0]
        return math.prod(int(n) for n in shape)


def load_config(path: Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of a local model folder.

    Raises:
        ModelNotFoundError: config.json cannot be understood.
    """
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFoundError(
            f"model: {path}/config.json cannot be read: {error}", field="model"
        ) from error


def causal_class(
    config: PreTrainedConfig, path: Path | None = None, trust_remote_code: bool = False
) -> type[PreTrainedModel]:
    """The class that serves ``config`` as a decoder with a language-model head.

    Raises:
        UnsupportedError: there is none.
    """
    remote = getattr(config, "auto_map", {}).get("AutoModelForCausalLM") if trust_remote_code else None
    if remote and path is not None:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        found: type[PreTrainedModel] = get_class_from_dynamic_module(remote, path)
        return found
    if config.is_encoder_decoder or type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedError(
            f"model: {config.model_type} is not a decoder that generates text; "
            "only causal language models are served so far",
            field="model",
        )
    found = AutoModelForCausalLM._model_mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


def build_empty(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """A model whose weights of any size are on meta, in eval mode, without gradients.

    Args:
        model_class: a causal model class.
        config: not changed; the model keeps a copy.
        dtype: of its floating-point parameters.
    """
    config = copy.deepcopy(config)
    config.dtype = dtype
    with _BigOnMeta():
        model = model_class._from_config(config, attn_implementation="eager", dtype=dtype)
    return model.eval().requires_grad_(False)


def model_length(config: PreTrainedConfig) -> int | None:
    """Positions the model was made for, or None where its config does not say."""
    for name in ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "n_ctx"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
