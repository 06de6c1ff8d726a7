"""``shoal bench``: measuring, one subcommand for each thing measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from shoal.cli.flags import Flag, taking
from shoal.cli.options import COMMON, JSON, set_up_logs
from shoal.cli.output import human_bytes, print_json, print_table
from shoal.errors import UsageError

__all__ = ["app", "comm"]

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Measure."""


_COMM = (
    Flag(name="ranks", type=int, help="Processes that take part, 2 to 8.", default="2", metavar="N"),
    Flag(
        name="sizes",
        type=str,
        help="Bytes of the tensor that comes out, by commas.",
        default="4096,65536,1048576",
        metavar="N,...",
    ),
    Flag(name="backends", type=str, help="Transports, by commas.", default="shm,gloo", metavar="NAME,..."),
    Flag(
        name="operations",
        type=str,
        help="all_reduce, all_gather, broadcast, by commas.",
        default="all_reduce",
        metavar="NAME,...",
    ),
    Flag(name="repeats", type=int, help="Calls measured of each.", default="200", metavar="N"),
)


@app.command()
@taking(_COMM, JSON, COMMON)
def comm(*, options: Mapping[str, Any]) -> None:
    """Measure collectives between processes of this host: latency and bandwidth of each transport."""
    from shoal.bench.comm import Order, measure

    set_up_logs(options, default_level="warning")
    asked: dict[str, Any] = {name: options[name] for name in ("ranks", "repeats") if name in options}
    for name in ("backends", "operations"):
        if name in options:
            asked[name] = tuple(options[name].split(","))
    if "sizes" in options:
        asked["sizes"] = _numbers(options["sizes"])
    rows = [
        {name: getattr(row, name) for name in row.__dataclass_fields__} for row in measure(Order(**asked))
    ]
    if options.get("json"):
        print_json({"rows": rows})
        return
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


def _numbers(text: str) -> tuple[int, ...]:
    """Whole numbers by commas.

    Raises:
        UsageError: something else is among them.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"sizes: whole numbers by commas, got {text!r}", field="sizes") from error
