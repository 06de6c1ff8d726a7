"""``shoal plan``: what of a model is split how, why, and the bytes per rank. Needs no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from shoal.cli.flags import Flag, taking
from shoal.cli.options import COMMON, ENGINE, JSON, engine_options, set_up_logs
from shoal.cli.output import human_bytes, print_json, print_lines
from shoal.config import EngineConfig, make_config

__all__ = ["app", "as_text", "plan"]

app = typer.Typer(add_completion=False)

_FLAGS = ("tensor_parallel_size", "policy", "dtype", "device", "revision", "trust_remote_code")

_PROVE = (
    Flag(
        name="prove",
        type=bool,
        help="Prove the plan anew, even if it was proved before; any part that fails is an error.",
    ),
)


@app.command()
@taking([flag for flag in ENGINE if flag.name in _FLAGS], _PROVE, JSON, COMMON)
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="Hub id, folder (its config.json is enough), .gguf file or demo.",
            envvar="SHOAL_MODEL",
            metavar="MODEL",
        ),
    ],
    *,
    options: Mapping[str, Any],
) -> None:
    """Show what of a model is split how, why, and the bytes per rank."""
    set_up_logs(options, default_level="warning")
    config = make_config(model=model, **engine_options(options))
    report = _make_report(config, bool(options.get("prove")))
    if options.get("json"):
        print_json(report)
    else:
        print_lines(as_text(report))


def _make_report(config: EngineConfig, anew: bool) -> dict[str, Any]:
    """Plan, prove, and count.

    Raises:
        UsageError: no such model, one that is not supported, or a policy that cannot be understood.
        PlanError: no plan proves at this rank count, or the policy asks for what is wrong.
    """
    import torch

    from shoal.cli.plan_report import ModelFacts, plan_report
    from shoal.device.base import resolve_device, resolve_dtype
    from shoal.home import home
    from shoal.model.foresee import foresee
    from shoal.model.plans import read_subject
    from shoal.plan.skeleton import build_on_meta
    from shoal.prove.prove import plan_and_prove

    subject = read_subject(config.model, config.trust_remote_code, config.revision)
    proved = plan_and_prove(
        subject.model_class,
        subject.config,
        config.tensor_parallel_size,
        home() / "plans",
        config.policy,
        anew,
    )
    choice = resolve_dtype(config.dtype, resolve_device(config.device), subject.config.dtype)
    dtype: torch.dtype = getattr(torch, choice.name)
    facts = ModelFacts(
        name=config.model,
        architecture=subject.model_class.__name__,
        bytes_per_number=dtype.itemsize,
        way=foresee(proved, subject.model_class, subject.config),
    )
    return plan_report(proved, build_on_meta(subject.model_class, subject.config), facts)


def as_text(report: Mapping[str, Any]) -> list[str]:
    """The report as a table of blocks and one of ranks."""
    coverage = report["coverage"]
    lines = [
        f"{report['model']}: {report['architecture']} over {report['tp']} rank(s)",
        f"proved: {'yes' if report['proved'] else 'no'}",
        *_proof(report["evidence"]),
        f"weights: {coverage['column_row']:.1%} split by column and row, "
        f"{coverage['gathered']:.1%} gathered, {coverage['replicated']:.1%} replicated "
        f"({report['vocabulary']:.1%} are vocabulary)",
        f"collectives per token: {report['collectives_per_forward']} "
        f"({report['all_reduces']} all-reduces, {report['all_gathers']} all-gathers)",
        *(f"summed late: {entry['module']}" for entry in report["reductions"]),
        *_way(report["way"]),
        "",
    ]
    blocks = [("block", "split", "components per rank", "features per rank", "reason")]
    for block in report["blocks"]:
        components = block["components"]
        shares = " / ".join(map(str, components["per_rank"])) if components else "-"
        sizes = " / ".join(map(str, block["sizes"])) or "whole"
        blocks.append((block["pattern"], block["split"], shares, sizes, block["reason"]))
    ranks = [("rank", "weights", "KV per token", "heads", "KV heads")]
    for rank in report["ranks"]:
        kv_bytes = rank["kv_bytes_per_token"]
        figures = (
            human_bytes(rank["weight_bytes"]),
            "unknown" if kv_bytes is None else human_bytes(kv_bytes),
        )
        ranks.append((str(rank["rank"]), *figures, _shown(rank["heads"]), _shown(rank["kv_heads"])))
    cache = [] if report["kv_cache"] == "measured" else ["", f"KV cache: {report['kv_cache']}"]
    return [*lines, *_table(blocks), "", *_table(ranks), *cache]


def _proof(evidence: Mapping[str, Any]) -> list[str]:
    """What the proof was, in a line."""
    if "proof_elements" not in evidence:
        return []
    decode = ", with a decode step" if evidence.get("proof_decode") else ""
    return [
        f"proof: relative error {evidence['relative_error']:.1e} ({evidence['tolerance']:.0e} is allowed) on "
        f"{evidence['proof_elements']} random weights, {evidence['proof_attention']}{decode}"
    ]


def _way(foreseen: Mapping[str, Any] | None) -> list[str]:
    """How the model will be served, in a line."""
    if foreseen is None:
        return []
    if foreseen["way"] == "none":
        return [f"cannot be served: {'; '.join(foreseen['reasons'])}"]
    return [f"served the {foreseen['way']} way{': ' if foreseen['cost'] else ''}{foreseen['cost']}"]


def _shown(value: object) -> str:
    return "-" if value is None else str(value)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
