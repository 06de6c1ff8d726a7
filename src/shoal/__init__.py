"""shoal: one Hugging Face model over many devices, as one.

Importing it is cheap: what needs torch and transformers is loaded at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from shoal.engine.front import AsyncLLM
    from shoal.engine.llm import LLM
    from shoal.model.plans import plan, prove
    from shoal.parallel.api import parallelize

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "SamplingParams",
    "__version__",
    "parallelize",
    "plan",
    "prove",
]

_LAZY = {"LLM": "shoal.engine.llm", "AsyncLLM": "shoal.engine.front", "parallelize": "shoal.parallel.api"}
_CALLABLE_PACKAGES = ("plan", "prove")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in _CALLABLE_PACKAGES:
        return import_module(f"shoal.{name}")
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
