"""Writes docs/families.md: how every family of the zoo is split, and that real ranks give what one gives.

Run from the project's root, on an idle machine (minutes)::

    PYTHONPATH=tests python -m support.families_table --output docs/families.md

``--plan-only`` leaves out the ranks, ``--json FILE`` keeps the rows as data, names of families choose some.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

from shoal.errors import UnsupportedError
from shoal.plan.footprint import Footprint, footprint
from shoal.plan.skeleton import build_on_meta
from shoal.plan.types import Plan, pattern_of
from shoal.prove import plan_and_prove
from support.rank_pool import RankPool, RankPoolError
from support.zoo.catalogue import LISTED, UNLISTED
from support.zoo.cell import Reference, make_reference, run_cell
from support.zoo.encode import LENGTHS, encode
from support.zoo.family import Family
from support.zoo.serve import save

__all__ = ["Row", "exceptions", "measure"]

RANKS = (2, 3, 4)  # of the listed families
UNLISTED_RANKS = (2,)
SERVED_RANKS = (1, 2, 3)  # of encoders, through the engine


@dataclasses.dataclass
class Row:
    """What the table says of a family; shares are of parameter bytes at 2 ranks."""

    name: str
    model_class: str = ""
    ways: str = ""  # what is dealt out, by region
    column_row: float = 0.0
    gathered: float = 0.0
    replicated: float = 0.0
    largest: float = 0.0  # the largest rank's share of all bytes
    all_reduces: int = 0  # per forward
    all_gathers: int = 0
    seconds: float = 0.0  # of planning and proof
    errors: dict[str, float] = dataclasses.field(default_factory=dict)  # "2 eager float64" -> relative error
    generates: str = ""
    served_way: str = ""  # of encoders, through the engine's ranks
    served: dict[str, float] = dataclasses.field(default_factory=dict)  # ranks -> relative error
    exceptions: list[str] = dataclasses.field(default_factory=list)
    failure: str = ""


def exceptions(plan: Plan) -> list[str]:
    """What inside a stack of layers is gathered or whole, by the reason why; what is small does not count."""
    by_reason: dict[str, list[str]] = {}
    for pattern, split in plan.params.items():
        is_meant = split.op in ("gather", "replicate") and ".*." in pattern_of(pattern)
        if is_meant and "small:" not in split.reason:
            by_reason.setdefault(f"{split.op}: {split.reason}", []).append(pattern)
    return [f"{', '.join(f'`{_short(name)}`' for name in names)} {why}" for why, names in by_reason.items()]


def measure(family: Family, pool: RankPool | None, ranks: Sequence[int] = RANKS) -> Row:
    """Plan a family over each rank count and, given a pool, run it there."""
    row = Row(family.name)
    try:
        _fill(row, family, pool, ranks)
    except Exception as error:  # a family may fail in any way; the table says how
        row.failure = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:300]}"
    return row


def _serve(row: Row, family: Family) -> None:
    """Have an encoder's ranks encode texts of different lengths at once."""
    with tempfile.TemporaryDirectory() as folder:
        path = save(family, Path(folder))
        for count in SERVED_RANKS:
            try:
                found = encode(family, path, count)
            except UnsupportedError as error:
                row.served_way = f"not served: {str(error)[:200]}"
                return
            row.served_way, row.served[str(count)] = found.way, found.error


def _fill(row: Row, family: Family, pool: RankPool | None, ranks: Sequence[int]) -> None:
    model_class, config = family.load()
    row.model_class = model_class.__name__
    references: dict[str, Reference] = {}
    for count in ranks:
        started = time.monotonic()
        plan = plan_and_prove(model_class, config, count)
        if count == ranks[0]:
            row.seconds = time.monotonic() - started
            _describe(row, plan, footprint(plan, build_on_meta(model_class, config), 4), model_class, config)
        if pool is not None:
            for attention in filter(family.has_attention, family.attention):
                if attention not in references:
                    references[attention] = make_reference(family, attention)
                _run(row, plan, attention, references[attention], pool)
    if pool is not None and family.kind == "encoder":
        _serve(row, family)


def _describe(row: Row, plan: Plan, costs: Footprint, model_class: type, config: object) -> None:
    whole = footprint(Plan(1, plan.model_class), build_on_meta(model_class, config), 4).ranks[0].weight_bytes
    row.column_row = costs.coverage.column_row
    row.gathered = costs.coverage.gathered
    row.replicated = costs.coverage.replicated
    row.largest = max(rank.weight_bytes for rank in costs.ranks) / whole
    row.ways = "; ".join(
        f"{_short(region.consumer)} {'+'.join(str(share) for share in region.shares)}"
        for region in plan.regions
    )
    row.exceptions = exceptions(plan)


def _short(pattern: str) -> str:
    """The last two components that say something."""
    parts = [part for part in pattern.split(".") if part not in ("weight", "*")]
    return ".".join(parts[-2:])


def _run(row: Row, plan: Plan, attention: str, reference: Reference, pool: RankPool) -> None:
    try:
        answers = pool.run(run_cell, row.name, plan.to_dict(), attention, reference, ranks=plan.tp)
    except RankPoolError as error:
        raise RuntimeError(f"{plan.tp} ranks, {attention}: {error}") from error
    for at, expected in enumerate(reference.forwards):
        key = f"{plan.tp} {attention} {str(expected.dtype).removeprefix('torch.')}"
        error = max(answer.errors[at] for answer in answers)
        row.errors[key] = max(row.errors.get(key, 0.0), error)
    if plan.tp == RANKS[0]:
        row.all_reduces, row.all_gathers = answers[0].all_reduces, answers[0].all_gathers
    if reference.dtype is not None and row.generates != "no":
        row.generates = "yes" if all(answer.tokens == reference.tokens for answer in answers) else "no"


# ------------------------------------------------------------------ the page


def _encoders(rows: list[Row]) -> Iterator[str]:
    """How encoders are served."""
    chosen = [row for row in rows if row.served_way]
    if not chosen:
        return
    yield f"Encoders through the engine: {len(LENGTHS)} texts of different lengths at once.\n"
    yield f"| family | way | {' | '.join(f'{count} rank(s)' for count in SERVED_RANKS)} |"
    yield "|---|---|" + "---|" * len(SERVED_RANKS)
    for row in chosen:
        errors = [
            f"{row.served[str(count)]:.0e}" if str(count) in row.served else "" for count in SERVED_RANKS
        ]
        yield f"| {row.name} | {row.served_way} | {' | '.join(errors)} |"
    yield ""


def page(tables: dict[str, list[Row]]) -> Iterator[str]:
    versions = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    yield "# Families\n"
    yield (
        f"Measured {datetime.now(UTC):%Y-%m-%d} with {versions}, gloo between processes of one machine. "
        "Made by `make families` (`PYTHONPATH=tests python -m support.families_table`); the models are tiny "
        "random ones (`tests/support/zoo`), and `tests/ranks/test_ranks_families.py` holds them to this.\n"
    )
    yield from _legend()
    for title, rows in tables.items():
        yield f"## {title}\n"
        yield from _table(rows)
        yield from _encoders(rows)
        yield from _exceptions(rows)


def _legend() -> Iterator[str]:
    yield "- *dealt out*: what each of 2 ranks gets of a region's components (heads, KV groups, neurons)."
    yield "- *col-row, gathered, whole*: shares of parameters at 2 ranks, vocabulary included."
    yield "- *largest*: the larger rank's share of the parameter bytes at 2 ranks."
    yield "- *sums, gathers*: collectives of one forward of the two-layer model at 2 ranks."
    yield (
        "- *float64*, *float32*: the largest relative error at every rank count and attention, rows "
        "padded left and right; float32 is where the model's own code gives no finite numbers in float64."
    )
    yield "- *greedy*: 8 tokens with cache are the same on every rank; blank: nothing is generated."
    yield (
        "- *way* of an encoder: *packed* computes layers on the texts' tokens alone, *padded* on texts of "
        "like length with a mask, *alone* on one text after the other; beside it the largest relative error "
        "of vectors and words against transformers, one text at a time."
    )
    yield "- *s*: seconds of planning and proof at 2 ranks.\n"


def _table(rows: list[Row]) -> Iterator[str]:
    yield (
        "| family | class | dealt out | col-row | gathered | whole | largest | sums | gathers | float64 "
        "| float32 | greedy | s |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        if row.failure:
            yield f"| {row.name} | {row.model_class} | {row.failure} |||||||||||"
            continue
        worst = {
            dtype: max((error for key, error in row.errors.items() if key.endswith(dtype)), default=None)
            for dtype in ("float64", "float32")
        }
        errors = ["" if error is None else f"{error:.0e}" for error in worst.values()]
        shares = [f"{share:.1%}" for share in (row.column_row, row.gathered, row.replicated, row.largest)]
        counts = [str(row.all_reduces), str(row.all_gathers)]
        cells = [row.name, row.model_class, row.ways, *shares, *counts, *errors, row.generates]
        yield f"| {' | '.join(cells)} | {row.seconds:.1f} |"
    yield ""


def _exceptions(rows: list[Row]) -> Iterator[str]:
    named = [row for row in rows if row.exceptions]
    if named:
        yield "Inside the layers of these, weights are gathered or whole:\n"
    for row in named:
        yield f"- **{row.name}**: {'; '.join(row.exceptions)}"
    if named:
        yield ""


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    pool = None if options.plan_only else RankPool()
    tables: dict[str, list[Row]] = {}
    for what, families, usual in (
        ("The listed families", LISTED, RANKS),
        ("Families nobody listed", UNLISTED, UNLISTED_RANKS),
    ):
        ranks = options.ranks or usual
        title = f"{what}, at {', '.join(str(count) for count in ranks)} ranks"
        chosen = [
            f for f in families.values() if f.is_known and (not options.names or f.name in options.names)
        ]
        for family in chosen:
            row = measure(family, pool, ranks)
            tables.setdefault(title, []).append(row)
            print(f"{row.name}: {row.failure or row.errors}", file=sys.stderr, flush=True)
    if pool is not None:
        pool.close()
    if options.json:
        rows = {title: [dataclasses.asdict(row) for row in rows] for title, rows in tables.items()}
        options.json.write_text(json.dumps(rows, indent=1))
    text = "\n".join(page(tables))
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
