"""Writes rows of measurements as docs/families.md. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import torch
import transformers

from support.zoo.encode import LENGTHS as TEXTS
from support.zoo.family import Family
from support.zoo.registered import without_family
from support.zoo.serve import UNCACHED
from support.zoo.split import Split
from support.zoo.trial import LENGTHS, TOKENS, Service, Trial

__all__ = ["SERVED_RANKS", "Row", "page"]

SERVED_RANKS = (1, 2, 3)
_SPLIT_HEADS = (
    "dealt out", "col-row", "gathered", "whole", "largest", "sums", "gathers", "float64", "float32", "greedy",
    "s",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What was measured of a family; a split is measured once for all heads of a classifier's family."""

    family: Family
    service: Service
    split: Split | None = None

    @property
    def trials(self) -> dict[str, list[Trial]]:
        """By rank count: its text's, then its vectors'."""
        parts = (self.service.generated, self.service.encoded)
        return {
            str(count): [part[str(count)] for part in parts if str(count) in part] for count in SERVED_RANKS
        }

    @property
    def way(self) -> str:
        """How its text is made, and its vectors; with rank counts where it depends on them."""
        return "; ".join(filter(None, (_way(self.service.generated), _way(self.service.encoded))))

    def verdict(self, count: int) -> str:
        """Of a rank count: the largest relative error, or what is wrong."""
        trials = self.trials[str(count)]
        odd = [trial.verdict for trial in trials if trial.verdict != "equal"]
        return odd[0] if odd else f"{max(trial.error for trial in trials):.0e}"

    @property
    def problems(self) -> list[str]:
        """What the table has to say of its service, each once, with the rank counts."""
        said: dict[str, list[str]] = {}
        for count, trials in self.trials.items():
            for trial in trials:
                if trial.verdict != "equal":
                    text = trial.problem or f"off by {trial.error:.0e}"
                    said.setdefault(f"{trial.verdict}: {text}", []).append(count)
        return [f"{text} (at {', '.join(counts)} ranks)" for text, counts in said.items()]


def _way(trials: Mapping[str, Trial]) -> str:
    ways = [trial.way for trial in trials.values() if trial.way]
    if len(set(ways)) < 2:
        return "".join(ways[:1])
    return ", ".join(f"{trial.way} ({count})" for count, trial in trials.items())


def page(tables: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """The page's paragraphs; ``tables`` are sections by title."""
    versions = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    yield "# Families\n"
    yield (
        f"Measured {datetime.now(UTC):%Y-%m-%d} with {versions}. Made by `make families` "
        "(`PYTHONPATH=tests python -m support.families_table`); the models are tiny random ones "
        "(`tests/support/zoo`), and `tests/ranks/test_ranks_families.py` and "
        "`tests/e2e/test_e2e_families.py` hold them to this.\n"
    )
    yield f"{_summary([row for rows in tables.values() for row in rows])}\n"
    yield from _legend()
    for title, rows in tables.items():
        yield f"## {title}\n"
        yield from _table(rows)
        yield from _remarks("Of the service of these there is something to say:", rows, "problems")
        yield from _remarks("Inside the layers of these, weights are gathered or whole:", rows, "exceptions")
    yield from _registered([row.family for rows in tables.values() for row in rows])


def _registered(families: Sequence[Family]) -> Iterator[str]:
    yield "## Registered as causal, seq2seq or masked, and not here\n"
    for reason, classes in without_family(families).items():
        yield f"- {reason or 'not refused, and not tried'}: {', '.join(classes)}"
    yield ""


def _summary(rows: Sequence[Row]) -> str:
    verdicts = [{trial.verdict for trials in row.trials.values() for trial in trials} for row in rows]
    equal = sum(found == {"equal"} for found in verdicts)
    wrong = sum("wrong" in found for found in verdicts)
    return (
        f"Of {len(rows)} families, variants and heads, {equal} are served at 1, 2 and 3 ranks, and give what "
        f"transformers gives; {len(rows) - equal - wrong} are not served, or not for all that they are for, "
        f"and the reason stands below their table; {wrong} are wrong."
    )


def _legend() -> Iterator[str]:
    yield (
        "The split, between processes of one machine over gloo:\n\n"
        "- *dealt out*: what each of 2 ranks gets of a region's components (heads, KV groups, neurons).\n"
        "- *col-row, gathered, whole*: shares of parameters at 2 ranks, vocabulary included.\n"
        "- *largest*: the larger rank's share of the parameter bytes at 2 ranks.\n"
        "- *sums, gathers*: collectives of one forward of the two-layer model at 2 ranks.\n"
        "- *float64*, *float32*: the largest relative error at every rank count and attention, rows "
        "padded left and right; float32 is where the model's own code gives no finite numbers in float64.\n"
        "- *greedy*: 8 tokens with cache are the same on every rank; blank: nothing is generated.\n"
        "- *s*: seconds of planning and proof at 2 ranks.\n"
    )
    yield (
        "The service, by a whole engine whose ranks are threads of one process, over the same collectives' "
        "interface (processes for reformer, whose layers seed torch's generator):\n\n"
        f"- {len(LENGTHS)} requests are submitted at once, of {', '.join(map(str, LENGTHS))} tokens to go on "
        f"from, for {TOKENS} tokens each; where an encoder is to be served, {len(TEXTS)} texts of "
        f"{', '.join(map(str, TEXTS))} tokens.\n"
        "- *way*: how text is made, and behind a semicolon how vectors are, where a model is for both. For "
        "text: *fused* (paged, with layers in our kernels), *paged*, *padded*, *state*, *recompute*, "
        "*seq2seq* (docs/architecture.md); for vectors: *packed* computes layers on the texts' tokens alone, "
        "*padded* on texts of like length with a mask, *alone* on one text after the other; *no vectors*: "
        "below the head are no vectors of tokens, and the head's task alone is served.\n"
        "- *1*, *2*, *3*: at so many ranks every greedy id is transformers' own, each request given to it "
        "alone in float32; the number is the largest relative error of the log probabilities of the 20 "
        "likeliest tokens at every step, or of vectors, of words at masks and of scores of classes.\n"
    )
    yield (
        f"{', '.join(sorted(UNCACHED))}: `generate` is asked not to use a cache. With one, it computes "
        "something else: tokens are hashed, masked, cut into patches or placed otherwise.\n"
    )


def _table(rows: Sequence[Row]) -> Iterator[str]:
    has_splits = any(row.split is not None for row in rows)
    heads = ["family", "class", *(_SPLIT_HEADS if has_splits else ()), "way", *map(str, SERVED_RANKS)]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        split = [] if row.split is None else _split_cells(row.split)
        service = [row.way, *(row.verdict(count) for count in SERVED_RANKS)]
        yield f"| {' | '.join([row.family.name, row.family.model_class, *split, *service])} |"
    yield ""


def _split_cells(split: Split) -> list[str]:
    if split.failure:
        return [split.failure, *[""] * 10]
    worst = [
        max((error for key, error in split.errors.items() if key.endswith(dtype)), default=None)
        for dtype in ("float64", "float32")
    ]
    errors = ["" if error is None else f"{error:.0e}" for error in worst]
    shares = [f"{share:.1%}" for share in (split.column_row, split.gathered, split.replicated, split.largest)]
    counts = [str(split.all_reduces), str(split.all_gathers)]
    return [split.ways, *shares, *counts, *errors, split.generates, f"{split.seconds:.1f}"]


def _remarks(title: str, rows: Sequence[Row], kind: Literal["problems", "exceptions"]) -> Iterator[str]:
    said = [
        (row, row.problems if kind == "problems" else row.split.exceptions if row.split is not None else [])
        for row in rows
    ]
    found = [f"- **{row.family.name}**: {'; '.join(remarks)}" for row, remarks in said if remarks]
    if found:
        yield "\n".join([f"{title}\n", *found, ""])
