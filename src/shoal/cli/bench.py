"""``shoal bench``: measuring, one subcommand for each thing measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer

from shoal.bench.cost import Ceiling
from shoal.bench.rows import Row
from shoal.cli.bench_options import (
    COMM,
    CONTEXT,
    OFFLINE,
    SERVE,
    TP,
    engine_arguments,
    listed,
    numbers,
    peers,
    settings,
    shared_options,
)
from shoal.cli.flags import taking
from shoal.cli.options import COMMON, JSON, engine_options, set_up_logs
from shoal.cli.output import print_json
from shoal.errors import EngineError, ShoalError, UsageError

__all__ = ["app", "comm", "context", "offline", "serve", "tp"]

app = typer.Typer(add_completion=False, no_args_is_help=True)

_MODEL = typer.Argument(help="Hub id, folder, .gguf file or demo.", envvar="SHOAL_MODEL", metavar="MODEL")
_NUM_PROMPTS = 32
_LOAD = (  # options that are fields of OnlineOrder
    "api_key",
    "endpoint",
    "max_tokens",
    "ignore_eos",
    "temperature",
    "concurrency",
    "request_rate",
    "seed",
)


@app.callback()
def _bench() -> None:
    """Measure."""


@app.command()
@taking(COMM, JSON, COMMON)
def comm(*, options: Mapping[str, Any]) -> None:
    """Measure collectives between processes of this host: latency and bandwidth of each transport."""
    from shoal.bench.comm import Order, measure
    from shoal.cli.bench_report import print_comm

    set_up_logs(options, default_level="warning")
    asked: dict[str, Any] = {name: options[name] for name in ("ranks", "repeats") if name in options}
    for name in ("backends", "operations"):
        if name in options:
            asked[name] = tuple(options[name].split(","))
    if "sizes" in options:
        asked["sizes"] = numbers(options["sizes"], "sizes")
    rows = [asdict(row) for row in measure(Order(**asked))]
    if options.get("json"):
        print_json({"rows": rows})
    else:
        print_comm(rows)


@app.command()
@taking(OFFLINE, JSON, COMMON)
def offline(model: Annotated[str, _MODEL] = "demo", *, options: Mapping[str, Any]) -> None:
    """Measure output tokens per second of whole workloads at several rank counts, and whether they compute
    the same. Exit status 1 if they do not."""
    from shoal.cli.bench_report import document, plot, print_rows

    set_up_logs(options, default_level="warning")
    found = _measured(model, options, "all")
    roofs = () if found.ceiling is None else tuple(found.ceiling.roofs.values())
    if options.get("json"):
        facts: dict[str, Any] = {"roofs": [asdict(roof) for roof in roofs]}
        facts["rows"] = [row.to_dict() for row in found.rows]
        print_json(_document(document, model, options, **facts))
    else:
        print_rows(found.rows, roofs)
    if "plot" in options:
        plot(options["plot"], found.rows)
    _raise_what_is_wrong(found)


@app.command()
@taking(TP, JSON, COMMON)
def tp(model: Annotated[str, _MODEL] = "demo", *, options: Mapping[str, Any]) -> None:
    """Measure how speed grows with the number of ranks, threads per rank fixed."""
    from shoal.bench.tp import DEFAULT_WORKLOADS, scaling
    from shoal.cli.bench_report import document, plot, print_scaling

    set_up_logs(options, default_level="warning")
    options = {"scale": "full", **options}
    found = _measured(model, options, ",".join(DEFAULT_WORKLOADS))
    threads = settings(options)[0][0].options["num_threads"]
    lines = list(scaling(found.rows, found.ranks, threads))
    if options.get("json"):
        print_json(_document(document, model, options, rows=[asdict(line) for line in lines]))
    else:
        print_scaling(lines)
    if "plot" in options:
        plot(options["plot"], found.rows)
    _raise_what_is_wrong(found)


@dataclass(slots=True)
class _Measured:
    """Rows, and what there is to know of them."""

    ranks: tuple[int, ...]
    ceiling: Ceiling | None
    rows: list[Row] = field(default_factory=list)
    failure: ShoalError | None = None  # what ended the measurement early: hours of rows may be there by then


def _measured(model: str, options: Mapping[str, Any], workloads: str) -> _Measured:
    """The rows, each also said on stderr when it is there."""
    from shoal.bench.offline import Order, measure
    from shoal.bench.plot import check_can_plot
    from shoal.bench.subject import load_ceiling, load_subject
    from shoal.bench.workloads import Scale, named
    from shoal.cli.bench_report import row_line

    if "plot" in options:
        check_can_plot(options["plot"])
    ours, ranks, threads = settings(options)
    chosen = named(listed(options, "workload", workloads))
    scale = Scale.parse(options.get("scale", "ci"))
    shared = shared_options(model, options)
    subject, path = load_subject(shared)
    totals = [s.options["tensor_parallel_size"] * s.options["num_threads"] for s in ours]
    ceiling = load_ceiling(shared, path, totals) if any(w.is_bare for w in chosen) else None
    order = Order(
        workloads=chosen,
        settings=ours,
        options=shared,
        scale=scale,
        repeats=options.get("repeats", 3),
        peers=peers(options, path, threads, subject.max_model_len),
        ceiling=ceiling,
    )
    found = _Measured(ranks, ceiling)
    try:
        for row in measure(order, subject):
            typer.echo(row_line(row), err=True)
            found.rows.append(row)
    except ShoalError as error:
        if not found.rows:
            raise
        found.failure = error
    return found


def _document(document: Any, model: str, options: Mapping[str, Any], **further: Any) -> dict[str, Any]:
    from shoal.bench.subject import machine

    facts = {
        "model": model,
        "scale": options.get("scale", "ci"),
        "repeats": options.get("repeats", 3),
        "settings": [asdict(setting) for setting in settings(options)[0]],
    }
    found: dict[str, Any] = document(machine(), **facts, **further)
    return found


def _raise_what_is_wrong(found: _Measured) -> None:
    """Raises:
    ShoalError: what ended the measurement early.
    EngineError: a row is incoherent.
    """
    if found.failure is not None:
        raise found.failure
    wrong = [row.workload.name for row in found.rows if not row.is_coherent]
    if wrong:
        raise EngineError(f"not the same computation: {', '.join(wrong)}")


@app.command()
@taking(CONTEXT, JSON, COMMON)
def context(model: Annotated[str, _MODEL] = "demo", *, options: Mapping[str, Any]) -> None:
    """Measure how a token's time grows with its context, beside the bytes of keys and values it reads."""
    from shoal.bench.chart import check_can_chart, context_chart
    from shoal.bench.context import ContextOrder, growth, measure_context
    from shoal.bench.subject import load_ceiling, load_subject, machine
    from shoal.cli.bench_report import document, point_line, print_context
    from shoal.device.cpu import threads_per_rank

    set_up_logs(options, default_level="warning")
    if "chart" in options:
        check_can_chart(options["chart"])
    asked: dict[str, Any] = {name: options[name] for name in ("tokens", "repeats") if name in options}
    if "lengths" in options:
        asked["lengths"] = numbers(options["lengths"], "lengths")
    own = {"model": model, **engine_options(options)}
    ranks = int(own.get("tensor_parallel_size", 1))
    own["num_threads"] = own.get("num_threads") or threads_per_rank(ranks)
    subject, path = load_subject(own)
    order = ContextOrder(own, subject.tokenizer.vocab_size, subject.max_model_len, **asked)
    order.fitting()
    total = ranks * own["num_threads"]
    ceiling = load_ceiling(own, path, [total])
    points = []
    for point in measure_context(order, None if ceiling is None else ceiling.cost):
        typer.echo(point_line(point), err=True)
        points.append(point)
    roof = None if ceiling is None else ceiling.roofs[total]
    line = growth(points, roof)
    if options.get("json"):
        facts = {"model": model, "options": own, "roof": None if roof is None else asdict(roof)}
        rows = [asdict(point) for point in points]
        print_json(document(machine(), **facts, rows=rows, growth=line.to_dict()))
    else:
        print_context(points, line, roof)
    if "chart" in options:
        options["chart"].write_text(context_chart(points, line, roof), encoding="utf-8")


@app.command()
@taking(SERVE, JSON, COMMON)
def serve(
    more: Annotated[
        list[str] | None, typer.Argument(help="Further targets of --goodput.", metavar="[METRIC:MS]...")
    ] = None,
    *,
    options: Mapping[str, Any],
) -> None:
    """Measure a server's latencies under load: time to first token, between tokens, to the end."""
    from shoal.bench.latency import parse_targets
    from shoal.bench.online import OnlineOrder, measure_online
    from shoal.bench.prompts import questions
    from shoal.cli.bench_report import document, print_latencies

    set_up_logs(options, default_level="warning")
    if ("url" in options) == ("model" in options):
        raise UsageError("url: name a server that runs by --url, or a model to serve by --model", field="url")
    if more and not options.get("goodput"):
        raise UsageError(f"{more[0]}: belongs behind --goodput", field="goodput")
    targets = parse_targets([*options.get("goodput", ()), *(more or ())])
    count = options.get("num_prompts", _NUM_PROMPTS)
    known = [f"Question: {q['question']}\nAnswer:" for q in questions()]
    # Beyond the known questions they come again, each with a beginning of its own: no prefix cache helps.
    prompts = [f"({i}) {known[i % len(known)]}" for i in range(count)]
    further = {name: options[name] for name in _LOAD if name in options}
    called = options.get("served_model_name")
    with _server(options) as url:
        order = OnlineOrder(url=url, prompts=prompts, model=called, targets=targets, **further)
        summary = measure_online(order)
    if options.get("json"):
        from shoal.bench.subject import machine

        print_json(document(machine(), summary=summary.to_dict()))
    else:
        print_latencies(summary)


@contextmanager
def _server(options: Mapping[str, Any]) -> Iterator[str]:
    """The URL that is asked for, or of a server started for the time."""
    if "url" in options:
        yield options["url"]
        return
    from shoal.bench.server_process import serving

    with serving(options["model"], engine_arguments(options)) as url:
        yield url
