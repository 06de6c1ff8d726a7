"""``shoal plan``: what of a model is split how, why, and the bytes per rank. Loads no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from shoal.cli.flags import taking
from shoal.cli.options import COMMON, ENGINE, JSON, engine_options, set_up_logs
from shoal.cli.output import human_bytes, print_json, print_lines
from shoal.config import EngineConfig, make_config

__all__ = ["app", "as_text", "plan"]

app = typer.Typer(add_completion=False)

_FLAGS = ("tensor_parallel_size", "dtype", "device", "revision", "trust_remote_code")


@app.command()
@taking([flag for flag in ENGINE if flag.name in _FLAGS], JSON, COMMON)
def plan(
    model: Annotated[
        str, typer.Argument(help="Hub id, folder, .gguf file or demo.", envvar="SHOAL_MODEL", metavar="MODEL")
    ],
    *,
    options: Mapping[str, Any],
) -> None:
    """Show what of a model is split how, why, and the bytes per rank."""
    set_up_logs(options, default_level="warning")
    report = _make_report(make_config(model=model, **engine_options(options)))
    if options.get("json"):
        print_json(report)
    else:
        print_lines(as_text(report))


def _make_report(config: EngineConfig) -> dict[str, Any]:
    """Plan, prove, and count.

    Raises:
        UsageError: no such model, or one that is not supported.
        PlanError: no plan proves at this rank count.
    """
    import torch

    from shoal.checkpoint.source import check_supported, home, resolve
    from shoal.cli.plan_report import ModelFacts, plan_report
    from shoal.device.base import resolve_device, resolve_dtype
    from shoal.model.build import build_empty, causal_class, load_config
    from shoal.prove.prove import plan_and_prove

    path = resolve(config.model, config.revision)
    hf_config = load_config(path, config.trust_remote_code)
    check_supported(hf_config)
    model_class = causal_class(hf_config, path, config.trust_remote_code)
    proved = plan_and_prove(model_class, hf_config, config.tensor_parallel_size, home() / "plans")
    choice = resolve_dtype(config.dtype, resolve_device(config.device), hf_config.dtype)
    dtype: torch.dtype = getattr(torch, choice.name)
    facts = ModelFacts(
        name=config.model,
        architecture=model_class.__name__,
        bytes_per_number=dtype.itemsize,
    )
    whole = build_empty(model_class, hf_config, dtype)
    whole.tie_weights()
    return plan_report(proved, whole, facts)


def as_text(report: Mapping[str, Any]) -> list[str]:
    """The report as a table of blocks and one of ranks."""
    coverage = report["coverage"]
    lines = [
        f"{report['model']}: {report['architecture']} over {report['tp']} rank(s)",
        f"proved: {'yes' if report['proved'] else 'no'}",
        f"weights: {coverage['column_row']:.0%} split by column or row, {coverage['gathered']:.0%} gathered, "
        f"{coverage['replicated']:.0%} replicated",
        f"collectives per forward: {report['collectives_per_forward']}",
        "",
    ]
    blocks = [("block", "split", "per rank", "components", "reason")]
    for block in report["blocks"]:
        sizes = " / ".join(map(str, block["sizes"])) or "whole"
        blocks.append((block["pattern"], block["split"], sizes, _shown(block["components"]), block["reason"]))
    ranks = [("rank", "weights", "KV per token", "heads", "KV heads")]
    for rank in report["ranks"]:
        kv_bytes = rank["kv_bytes_per_token"]
        kv_shown = "not measured" if kv_bytes is None else human_bytes(kv_bytes)
        figures = (human_bytes(rank["weight_bytes"]), kv_shown)
        ranks.append((str(rank["rank"]), *figures, _shown(rank["heads"]), _shown(rank["kv_heads"])))
    return [*lines, *_table(blocks), "", *_table(ranks)]


def _shown(value: object) -> str:
    return "-" if value is None else str(value)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
