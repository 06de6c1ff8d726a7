"""Plans families at published widths, in a process of its own so that its peak memory is theirs alone.

``python -m support.zoo.widths RANKS NAME...`` prints one JSON document a line and family.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import time
from typing import Any

import torch

from shoal.device.memory import peak_rss_bytes
from shoal.plan.skeleton import build_on_meta
from shoal.plan.types import Plan
from shoal.prove import plan_and_prove
from support.zoo.catalogue import LISTED
from support.zoo.family import Family
from support.zoo.published import PUBLISHED

__all__ = ["Width", "column_row_share", "main", "measure_width"]

COLUMN_ROW = ("column", "row", "experts")


@dataclasses.dataclass(frozen=True)
class Width:
    """What planning and proving a family at published widths took and gave."""

    name: str
    ranks: int
    seconds: float  # by the clock or of the processor, whichever is less: others may share the cores
    peak_bytes: int  # of the process, so far
    share: float  # of column-row, vocabulary set aside
    tiny_share: float  # of the tiny plan, by the published sizes
    differing: list[str]  # weights that are column-row in one of the two plans only


def column_row_share(plan: Plan, model: Any, vocabulary: int) -> float:
    """The share of weights that need no collective between producer and consumer.

    Vocabulary tables are set aside, and so are vectors (norms, biases) and what is replicated because it is
    small: at tiny widths they weigh more than they should.
    """
    total = split = 0
    for name, parameter in model.named_parameters():
        entry = plan.split_of(name)
        is_small = entry is not None and "small:" in entry.reason
        if parameter.dim() < 2 or is_small or (vocabulary and vocabulary in parameter.shape):
            continue
        total += parameter.numel()
        if entry is not None and entry.op in COLUMN_ROW:
            split += parameter.numel()
    return split / max(1, total)


def measure_width(name: str, ranks: int) -> Width:
    """Plan and prove at published widths, and compare with tiny ones over 2 ranks, which their heads fill."""
    started, used = time.monotonic(), time.process_time()
    plan = plan_and_prove(*PUBLISHED[name].load(), ranks)
    seconds = min(time.monotonic() - started, time.process_time() - used)
    tiny = plan_and_prove(*LISTED[name].load(), 2)
    model, vocabulary = _whole(PUBLISHED[name])
    differing = [
        f"{pattern}: {split.op} ({split.reason}), tiny {tiny.params[pattern].op}"
        for pattern, split in plan.params.items()
        if pattern in tiny.params and (split.op in COLUMN_ROW) != (tiny.params[pattern].op in COLUMN_ROW)
        if not any("small:" in entry.reason for entry in (split, tiny.params[pattern]))
    ]
    return Width(
        name,
        ranks,
        seconds,
        peak_rss_bytes(),  # not getrusage's, which a child starts with its parent's
        column_row_share(plan, model, vocabulary),
        column_row_share(tiny, model, vocabulary),
        differing,
    )


def _whole(family: Family) -> tuple[Any, int]:
    """The model on meta, and the size of its vocabulary."""
    model_class, config = family.load()
    return build_on_meta(model_class, config), getattr(config, "vocab_size", 0) or 0


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    ranks, *names = arguments
    for name in names:
        print(json.dumps(dataclasses.asdict(measure_width(name, int(ranks)))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
