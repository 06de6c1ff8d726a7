"""How speed grows with the number of ranks, threads per rank fixed: rows of :mod:`.offline`, read so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.bench.rows import Row

__all__ = ["DEFAULT_WORKLOADS", "Scaling", "scaling"]

DEFAULT_WORKLOADS = ("mixed_32", "one_request")


@dataclass(frozen=True, slots=True)
class Scaling:
    """One workload at one rank count."""

    workload: str
    ranks: int
    threads_per_rank: int
    tokens_per_s: float
    speedup: float  # over the first rank count, the median of the rounds' own ratios
    efficiency: float  # speed-up over the growth in ranks
    coherent: bool
    first_token_s: float | None = None  # where the workload tells them apart
    decode_tokens_per_s: float | None = None


def scaling(rows: Sequence[Row], ranks: Sequence[int], threads_per_rank: int) -> Iterator[Scaling]:
    """A line for each workload and rank count.

    Args:
        rows: each with one entry of ours a rank count, in the order of ``ranks``.
        ranks: the rank counts.
        threads_per_rank: of every one.
    """
    for row in rows:
        ours = [entry for entry in row.entries if entry.is_ours]
        for entry, size in zip(ours, ranks, strict=True):
            yield Scaling(
                workload=row.workload.name,
                ranks=size,
                threads_per_rank=threads_per_rank,
                tokens_per_s=entry.tokens_per_s,
                speedup=entry.ratio,
                efficiency=entry.ratio / (size / ranks[0]),
                coherent=entry.is_coherent,
                first_token_s=entry.first_token_s,
                decode_tokens_per_s=entry.decode_tokens_per_s,
            )
