"""How a family is split, and how far off real ranks are: the first part of a row of docs/families.md.
Knows no engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.plan.footprint import Footprint, footprint
from shoal.plan.skeleton import build_on_meta
from shoal.plan.types import Plan, pattern_of
from shoal.prove import plan_and_prove
from support.rank_pool import RankPool, RankPoolError
from support.zoo.cell import Reference, make_reference, run_cell
from support.zoo.family import Family

__all__ = ["Split", "exceptions", "measure_split"]


@dataclass
class Split:
    """What the table says of a family's split; shares are of parameter bytes at the first rank count."""

    ways: str = ""  # what is dealt out, by region
    column_row: float = 0.0
    gathered: float = 0.0
    replicated: float = 0.0
    largest: float = 0.0  # the largest rank's share of all bytes
    all_reduces: int = 0  # per forward
    all_gathers: int = 0
    seconds: float = 0.0  # of planning and proof, by the clock or of the processor, whichever is less
    errors: dict[str, float] = field(default_factory=dict)  # "2 eager float64" -> relative error
    generates: str = ""
    exceptions: list[str] = field(default_factory=list)
    failure: str = ""

    @property
    def is_right(self) -> bool:
        return not self.failure


def exceptions(plan: Plan) -> list[str]:
    """What inside a stack of layers is gathered or whole, by the reason why; what is small does not count."""
    by_reason: dict[str, list[str]] = {}
    for pattern, split in plan.params.items():
        is_meant = split.op in ("gather", "replicate") and ".*." in pattern_of(pattern)
        if is_meant and "small:" not in split.reason:
            by_reason.setdefault(f"{split.op}: {split.reason}", []).append(pattern)
    return [f"{', '.join(f'`{_short(name)}`' for name in names)} {why}" for why, names in by_reason.items()]


def measure_split(family: Family, pool: RankPool, ranks: Sequence[int]) -> Split:
    """Plan a family over each rank count, and run it there."""
    split = Split()
    try:
        _fill(split, family, pool, ranks)
    except Exception as error:  # a family may fail in any way; the table says how
        split.failure = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:300]}"
    return split


def _fill(split: Split, family: Family, pool: RankPool, ranks: Sequence[int]) -> None:
    model_class, config = family.load()
    references: dict[str, Reference] = {}
    for count in ranks:
        started, used = time.monotonic(), time.process_time()
        plan = plan_and_prove(model_class, config, count)
        seconds = min(time.monotonic() - started, time.process_time() - used)
        if count == ranks[0]:
            split.seconds = seconds
            _describe(
                split, plan, footprint(plan, build_on_meta(model_class, config), 4), model_class, config
            )
        for attention in filter(family.has_attention, family.attention):
            if attention not in references:
                references[attention] = make_reference(family, attention)
            _run(split, family, plan, attention, references[attention], pool, is_first=count == ranks[0])


def _describe(split: Split, plan: Plan, costs: Footprint, model_class: type, config: object) -> None:
    whole = footprint(Plan(1, plan.model_class), build_on_meta(model_class, config), 4).ranks[0].weight_bytes
    split.column_row = costs.coverage.column_row
    split.gathered = costs.coverage.gathered
    split.replicated = costs.coverage.replicated
    split.largest = max(rank.weight_bytes for rank in costs.ranks) / whole
    split.ways = "; ".join(
        f"{_short(region.consumer)} {'+'.join(str(share) for share in region.shares)}"
        for region in plan.regions
    )
    split.exceptions = exceptions(plan)


def _short(pattern: str) -> str:
    """The last two components that say something."""
    parts = [part for part in pattern.split(".") if part not in ("weight", "*")]
    return ".".join(parts[-2:])


def _run(
    split: Split,
    family: Family,
    plan: Plan,
    attention: str,
    reference: Reference,
    pool: RankPool,
    is_first: bool,
) -> None:
    try:
        answers = pool.run(run_cell, family.name, plan.to_dict(), attention, reference, ranks=plan.tp)
    except RankPoolError as error:
        raise RuntimeError(f"{plan.tp} ranks, {attention}: {error}") from error
    for at, expected in enumerate(reference.forwards):
        key = f"{plan.tp} {attention} {str(expected.dtype).removeprefix('torch.')}"
        error = max(answer.errors[at] for answer in answers)
        split.errors[key] = max(split.errors.get(key, 0.0), error)
    if is_first:
        split.all_reduces, split.all_gathers = answers[0].all_reduces, answers[0].all_gathers
    if reference.dtype is not None and split.generates != "no":
        split.generates = "yes" if all(answer.tokens == reference.tokens for answer in answers) else "no"
