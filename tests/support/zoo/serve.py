"""A family of the zoo through the engine, against transformers one prompt at a time. Knows no way by name."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shoal import LLM, SamplingParams
from shoal.engine.outputs import CompletionOutput
from shoal.engine.protocol import EngineInfo, EngineStats
from support.threads import ranks_as_threads
from support.zoo.build import build
from support.zoo.family import CUSTOM, NEURONS, VOCABULARY, Family

__all__ = [
    "TIGHT",
    "UNCACHED",
    "WHOLE",
    "Served",
    "aligned",
    "greedy",
    "options_of",
    "prompts",
    "ranks_of",
    "save",
    "serve",
]

WHOLE: dict[str, Any] = {"max_num_batched_tokens": 512}
TIGHT: dict[str, Any] = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 22}
"""Small chunks, and so few blocks that somebody is preempted."""

UNCACHED: dict[str, dict[str, Any]] = {
    "xlnet": {"use_mems": False},
    "reformer": {"use_cache": False},
    "cpmant": {"use_cache": False},
    "blt": {"use_cache": False},
    "prophetnet decoder": {"use_cache": False},
}
"""Of these, ``generate`` with a cache computes something else than without: tokens are hashed, masked,
cut into patches or placed otherwise. What it is asked to do instead."""

_ALIGNED_NEURONS = 256
_LENGTHS = (1, 2, 3, 4, 5, 9, 23, 38, 17, 17)


@dataclass(frozen=True)
class Served:
    """What an engine gave."""

    outputs: list[CompletionOutput]
    info: EngineInfo
    stats: EngineStats

    @property
    def tokens(self) -> list[list[int]]:
        return [output.token_ids for output in self.outputs]


def prompts(seed: int = 3, lengths: Sequence[int] = _LENGTHS) -> list[list[int]]:
    """Random ids of several lengths, by default some equal, around blocks of 4."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (count,), generator=generator).tolist() for count in lengths]


def aligned(family: Family) -> Family:
    """The family with experts that transformers can run: torch's grouped products, which it computes them by,
    take rows of whole 16 bytes only. A rank's share of them may still be odd.
    """
    if not any("expert" in name for name in family.settings):
        return family
    settings = {n: _ALIGNED_NEURONS if own == NEURONS else own for n, own in family.settings.items()}
    return replace(family, settings=settings)


def save(family: Family, folder: Path) -> Path:
    """The family's model, in float32, as a checkpoint folder without a tokenizer."""
    path = folder / family.name.replace(":", "_").replace(" ", "_")
    if not path.exists():
        model = build(family, "eager", torch.float32)
        model.save_pretrained(path)
        if family.is_custom:
            for source in (CUSTOM / family.config_class).glob("*.py"):
                shutil.copy(source, path)
    return path


def ranks_of(family: Family, tp: int) -> AbstractContextManager[None]:
    """Engines that are started meanwhile have the ranks that a family takes: threads, if they can be."""
    return nullcontext() if family.seeds and tp > 1 else ranks_as_threads()


def options_of(family: Family, tp: int) -> dict[str, Any]:
    """What an engine must be told to serve a family."""
    further = {"num_threads": 1} if family.seeds and tp > 1 else {}  # processes, on cores that they share
    return {"trust_remote_code": family.is_custom, **further}


@torch.no_grad()
def greedy(family: Family, prompt: Sequence[int], count: int, **options: Any) -> list[int]:
    """transformers' own continuation, end of sequence ignored."""
    model: Any = build(family, "eager", torch.float32)
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def serve(
    path: Path,
    asked: Sequence[Sequence[int]],
    count: int,
    tp: int,
    logprobs: int | None = None,
    **options: Any,
) -> Served:
    """All prompts at once through an engine of ``tp`` ranks."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=logprobs)
    settings: dict[str, Any] = {
        "block_size": 4,
        "kv_cache_memory_bytes": 1 << 25,
        "max_model_len": 60,
        "max_num_seqs": 6,
        "runner": "generate",
        **options,
    }
    with LLM(str(path), tensor_parallel_size=tp, **settings) as llm:
        found = llm.generate([list(prompt) for prompt in asked], params)
        return Served([output.outputs[0] for output in found], llm.info, llm.stats())
