"""The ``shoal`` command: finds the subcommand, runs it, turns what it raises into an exit status.

A subcommand's module is imported when it is run, so that ``shoal --help`` needs neither torch nor any
other heavy package.

| status | when |
|---|---|
| 0 | done |
| 1 | failed at run time |
| 2 | wrong usage or input |
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shoal.errors import ShoalError, UsageError

__all__ = ["COMMANDS", "app", "load_command", "main"]

COMMANDS = {
    "serve": "Serve a model to OpenAI's clients.",
    "generate": "Complete prompts offline.",
    "plan": "Show what of a model is split how, why, and the bytes per rank.",
    "bench": "Measure: workloads, a server under load, scaling, collectives.",
    "info": "Show devices, memory, the attention kernel and why, versions.",
    "pull": "Fetch a model.",
}


def load_command(name: str) -> Any:
    """The subcommand ``name`` as click's object, out of ``shoal.cli.<name>``."""
    command = typer.main.get_command(import_module(f"shoal.cli.{name}").app)
    command.name = name
    return command


class _LazyGroup(TyperGroup):
    """Lists placeholders, and loads a subcommand when it is the one to run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, placeholder, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name is not None else placeholder, rest


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"shoal {version('shoal')}")
        raise typer.Exit


@app.callback()
def _shoal(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """One Hugging Face model over many devices, as one."""


def _placeholder() -> None:
    raise AssertionError("a placeholder was run in place of its command")


for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(_placeholder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows ``shoal``; None: the process's own.

    Returns:
        the exit status.
    """
    try:
        app(args=arguments, prog_name="shoal")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except UsageError as error:
        return _complain(error, 2)
    except ShoalError as error:
        return _complain(error, 1)
    return 0


def _complain(error: ShoalError, status: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return status
