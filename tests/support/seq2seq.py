"""The zoo's encoder-decoders as checkpoint folders, and transformers' own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as T

from support.zoo.build import build
from support.zoo.family import VOCABULARY
from support.zoo.seq2seq import SEQ2SEQ

__all__ = ["answers", "load", "prompts", "save"]


def save(family: str, folder: Path) -> Path:
    """The family's model as a checkpoint folder (no tokenizer)."""
    path = folder / family.replace(":", "_")
    if not path.exists():
        build(SEQ2SEQ[family], "eager", torch.float32).save_pretrained(path)
    return path


def load(path: Path) -> Any:
    """What transformers makes of a folder: some weights are computed, not saved."""
    return T.AutoModelForSeq2SeqLM.from_pretrained(path).eval()


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def answers(
    model: Any, prompt: list[int], max_tokens: int, stop_ids: list[int] | None = None, **options: Any
) -> list[list[int]]:
    """transformers' own output ids, one list per sequence returned, up to the first of ``stop_ids``."""
    stop_ids = stop_ids or []
    model.generation_config.eos_token_id = stop_ids or None
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        **{"num_beams": 1, **options},
    )
    first = 1 if model.config.is_encoder_decoder else len(prompt)
    return [_cut(row, stop_ids) for row in out[:, first:].tolist()]


def _cut(row: list[int], stop_ids: list[int]) -> list[int]:
    ends = [place for place, token in enumerate(row) if token in stop_ids]
    return row[: ends[0] + 1] if ends else row
