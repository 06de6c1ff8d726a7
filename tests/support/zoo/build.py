"""Makes a family's model with random weights, the same in every process. Knows no sharding."""

from __future__ import annotations

from typing import Any

import torch
import transformers as T

from shoal.plan.skeleton import building
from support.zoo.family import Family

__all__ = ["build"]


def build(family: Family, attention: str, dtype: torch.dtype, seed: int = 0) -> T.PreTrainedModel:
    """The model in evaluation mode; every weight matters, so that no wrong slice hides.

    Zero biases, unit norms and matrices near zero would hide faults: biases and norms are random, and
    matrices are wide enough that logits are far from noise. Buffers are what the model computed.

    Args:
        attention: ``eager`` or ``sdpa``.
        seed: equal seeds give equal models, whatever was drawn before and whichever process draws.
    """
    model_class, config = family.load()
    config._attn_implementation = attention
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # the one that computes in float64
    with building(), torch.random.fork_rng():  # transformers' constructors change what threads share
        torch.manual_seed(seed)
        model: Any = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        parameter.data = _values(parameter, generator)
    model.requires_grad_(False)
    if model.can_generate():
        model.generation_config.eos_token_id = None  # all tokens asked for are generated
        model.generation_config.forced_eos_token_id = None
    return model.to(dtype)


def _values(parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Drawn in float32 whatever the model is in, so that float32 and float64 runs have one model."""
    noise = torch.empty(parameter.shape, dtype=torch.float32).normal_(generator=generator)
    if parameter.dim() <= 1:
        is_gain = parameter.numel() > 0 and bool((parameter == 1).all())
        return noise * 0.2 + (1.0 if is_gain else 0.0)
    return noise * min(0.3, 1.2 / parameter.shape[-1] ** 0.5)
