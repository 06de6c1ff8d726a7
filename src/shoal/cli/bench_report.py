"""What ``shoal bench`` prints of its rows, for people and for machines. Measures nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.bench.context import ContextPoint, Growth
from shoal.bench.cost import Share
from shoal.bench.latency import Percentiles, Summary
from shoal.bench.roof import Roof
from shoal.bench.rows import Entry, Row
from shoal.bench.tp import Scaling
from shoal.cli.output import human_bytes, print_lines, print_table

__all__ = [
    "document",
    "evidence",
    "plot",
    "point_line",
    "print_comm",
    "print_context",
    "print_latencies",
    "print_rows",
    "print_scaling",
    "row_line",
    "speeds",
    "verdict",
]


def document(machine: Mapping[str, Any], **further: Any) -> dict[str, Any]:
    """A result with what it takes to make it again."""
    return {"command": ["shoal", *sys.argv[1:]], "machine": dict(machine), **further}


def verdict(entry: Entry) -> str:
    """Whether an entry computed what the reference did, in a word; empty where nobody can tell."""
    if entry.agreement is None:
        return "reference" if entry.is_ours else ""
    if not entry.is_ours:
        return "same" if entry.is_coherent else "differs"
    return "coherent" if entry.is_coherent else "INCOHERENT"


def evidence(entry: Entry) -> str:
    """What the verdict rests on; empty for the reference."""
    found = entry.agreement
    if found is None:
        return ""
    words = f"{found.differing} of {found.requests} answers differ"
    if found.first is not None:
        kind = "a tie" if found.first.is_tie else "no tie"
        words += f" (answer to prompt {found.first_request} at token {found.first.position}: {kind}, "
        words += f"{found.first.gap:.1e} apart)"
    if entry.likelihood is not None:
        moved = entry.likelihood.other - entry.likelihood.reference
        words += f", mean log-likelihood {moved:+.1e} over {entry.likelihood.positions} tokens"
    return words


def row_line(row: Row) -> str:
    """One row on one line."""
    parts = [f"{entry.name} {entry.tokens_per_s:.1f} tokens/s" for entry in row.entries]
    return f"{row.workload.name}: {', '.join(parts)}, {'coherent' if row.is_coherent else 'INCOHERENT'}"


def print_rows(rows: Sequence[Row], roofs: Sequence[Roof] = ()) -> None:
    """All rows as a table, and what must be said of them."""
    cells = []
    for row in rows:
        for entry in row.entries:
            is_first = entry is row.entries[0]
            source = row.workload.source_ratio if entry.is_ours and not is_first else None
            cells.append(
                (
                    row.workload.name if is_first else "",
                    entry.name,
                    f"{sorted(entry.seconds)[len(entry.seconds) // 2]:.2f}",
                    f"{entry.tokens_per_s:.1f}",
                    f"{entry.ratio:.2f}",
                    "" if source is None else f"{source:.2f}",
                    "" if entry.accuracy is None else f"{entry.accuracy:.3f}",
                    verdict(entry),
                )
            )
    columns = ("workload", "", "seconds", "tokens/s", "ratio", "source's", "right", "verdict")
    print_table(columns, cells)
    for row in rows:
        print_lines(f"{row.workload.name}, {e.name}: {evidence(e)}" for e in row.entries if evidence(e))
    print_lines(_first_tokens(rows))
    print_lines(
        f"{row.workload.name}, {e.name}: {_share(e.share)}" for row in rows for e in row.entries if e.share
    )
    print_lines(map(_roof, roofs))
    print_lines(f"{row.workload.name}: {note}" for row in rows for note in row.notes)


def _share(share: Share) -> str:
    words = f"{share.compute:.0%} of the machine's arithmetic"
    if share.first_token_compute is not None:
        words += f", {share.first_token_compute:.0%} up to the first token"
    if share.decode_bandwidth is not None:
        words += f", then {share.decode_bandwidth:.0%} of its memory bandwidth"
    return words


def _roof(roof: Roof) -> str:
    threads = "1 thread" if roof.threads == 1 else f"{roof.threads} threads"
    reads, computes = roof.bytes_per_s / 1e9, roof.flops / 1e9
    return f"the machine, {threads}: reads {reads:.1f} GB/s, computes {computes:.0f} GFLOP/s in float32"


def _first_tokens(rows: Sequence[Row]) -> list[str]:
    return [
        _first_token(f"{row.workload.name}, {entry.name}", entry.first_token_s, entry.decode_tokens_per_s)
        for row in rows
        for entry in row.entries
        if entry.first_token_s is not None
    ]


def _first_token(place: str, seconds: float, decode: float | None) -> str:
    speed = "" if decode is None else f", then {decode:.1f} tokens/s"
    return f"{place}: first token after {seconds * 1e3:.0f} ms{speed}"


def speeds(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Tokens a second by contender, one a row."""
    names = dict.fromkeys(entry.name for row in rows for entry in row.entries)
    return {
        name: [next((e.tokens_per_s for e in row.entries if e.name == name), 0.0) for row in rows]
        for name in names
    }


def print_scaling(lines: Sequence[Scaling]) -> None:
    """Speed-ups as a table."""
    print_table(
        ("workload", "ranks", "threads each", "tokens/s", "speed-up", "efficiency", "verdict"),
        [
            (
                line.workload,
                str(line.ranks),
                str(line.threads_per_rank),
                f"{line.tokens_per_s:.1f}",
                f"{line.speedup:.2f}",
                f"{line.efficiency:.0%}",
                "coherent" if line.coherent else "INCOHERENT",
            )
            for line in lines
        ],
    )
    print_lines(
        _first_token(f"{line.workload}, {line.ranks} ranks", line.first_token_s, line.decode_tokens_per_s)
        for line in lines
        if line.first_token_s is not None
    )


def print_comm(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table of collectives."""
    print_table(
        ("op", "bytes", "ranks", "backend", "median", "90%", "GB/s"),
        [
            (
                row["op"],
                human_bytes(row["bytes"]),
                str(row["ranks"]),
                row["backend"],
                f"{row['median_us']:,.1f} µs",
                f"{row['p90_us']:,.1f} µs",
                f"{row['gbytes_per_s']:.2f}",
            )
            for row in rows
        ],
    )


def print_latencies(summary: Summary) -> None:
    """A load in numbers."""
    table = (
        ("time to first token", summary.ttft_ms),
        ("between tokens", summary.itl_ms),
        ("to the end", summary.e2e_ms),
    )
    print_table(
        ("ms", "mean", "50%", "90%", "95%", "99%"),
        [(name, *_percentiles(found)) for name, found in table if found is not None],
    )
    lines = [
        f"{summary.requests - summary.failed} of {summary.requests} requests in {summary.seconds:.2f} s: "
        f"{summary.requests_per_s:.2f} requests/s, {summary.output_tokens_per_s:.1f} tokens/s"
    ]
    if summary.first_error is not None:
        lines.append(f"{summary.failed} failed, the first with: {summary.first_error}")
    if summary.good is not None and summary.goodput_per_s is not None:
        lines.append(f"{summary.good} met every target: goodput {summary.goodput_per_s:.2f} requests/s")
    print_lines(lines)


def _percentiles(found: Percentiles) -> tuple[str, ...]:
    return tuple(f"{value:,.1f}" for value in (found.mean, found.p50, found.p90, found.p95, found.p99))


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Draw the speeds."""
    from shoal.bench.plot import bars

    bars(path, [row.workload.name for row in rows], speeds(rows), "output tokens/s")


def point_line(point: ContextPoint) -> str:
    """One length on one line."""
    return f"{point.context} tokens of context: {point.ms_per_token:.2f} ms a token"


def print_context(points: Sequence[ContextPoint], line: Growth, roof: Roof | None) -> None:
    """Decoding at each length as a table, and what further context costs."""
    print_table(
        ("context", "ms/token", "keys and values read", "GB/s with weights"),
        [
            (
                str(point.context),
                f"{point.ms_per_token:.2f}",
                human_bytes(round(point.kv_bytes)),
                "" if point.gbytes_per_s is None else f"{point.gbytes_per_s:.1f}",
            )
            for point in points
        ],
    )
    words = f"{line.base_ms:.2f} ms, and {line.ms_per_gbyte:.2f} ms for each GB of keys and values"
    if line.kv_gbytes_per_s is not None:
        words += f": {line.kv_gbytes_per_s:.1f} GB/s"
    if line.bandwidth_share is not None:
        words += f", {line.bandwidth_share:.0%} of what the machine reads"
    print_lines([f"{words} (no point is further than {line.largest_deviation:.1%} from this)"])
    print_lines([] if roof is None else [_roof(roof)])
