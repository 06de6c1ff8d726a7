"""``shoal pull``: fetch a model and print the folder it is in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from shoal.cli.flags import taking
from shoal.cli.options import COMMON, JSON, MODEL_FILES, set_up_logs
from shoal.cli.output import print_json, print_lines

__all__ = ["app", "pull"]

app = typer.Typer(add_completion=False)


@app.command()
@taking([flag for flag in MODEL_FILES if flag.name == "revision"], JSON, COMMON)
def pull(
    model: Annotated[str, typer.Argument(help="Hub id or demo.", envvar="SHOAL_MODEL", metavar="MODEL")],
    *,
    options: Mapping[str, Any],
) -> None:
    """Fetch a model and print the folder it is in."""
    set_up_logs(options)
    folder = str(_fetch(model, options.get("revision")))
    if options.get("json"):
        print_json({"model": model, "folder": folder})
    else:
        print_lines([folder])


def _fetch(model: str, revision: str | None) -> Any:
    from shoal.checkpoint.source import resolve

    return resolve(model, revision, progress=True)
