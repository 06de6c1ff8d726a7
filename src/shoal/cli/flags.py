"""What a flag is, and how a command gets a group of them. Knows no particular flag.

A flag called ``max_model_len`` is ``--max-model-len`` on the command line, ``SHOAL_MAX_MODEL_LEN`` in the
environment and ``max_model_len`` in the config file, and counts in that order. Its parameter is None
where nobody set it, so that a default is written in one place only: where it is used.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

__all__ = ["Flag", "taking"]

_PREFIX = "SHOAL_"


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One option, declared once for every command that has it."""

    name: str
    type: Any  # as typer takes it; not optional
    help: str
    default: str | None = None  # what its absence means, for --help
    short: tuple[str, ...] = ()  # further spellings: "-tp", "--memory-utilization"
    metavar: str | None = None
    panel: str | None = None  # heading in --help
    negative: bool = False  # a bool with --no-... beside it
    callback: Callable[..., Any] | None = None
    eager: bool = False

    @property
    def spelling(self) -> str:
        """``--max-model-len``."""
        return "--" + self.name.replace("_", "-")

    def parameter(self) -> inspect.Parameter:
        """The flag as a parameter of a typer command."""
        first = f"{self.spelling}/--no-{self.spelling[2:]}" if self.negative else self.spelling
        spellings = [first, *self.short]
        names = [self.name, *(s[2:].replace("-", "_") for s in self.short if s.startswith("--"))]
        variables = [_PREFIX + name.upper() for name in names]
        option = typer.Option(
            *spellings,
            help=self.help if self.default is None else f"{self.help} (default: {self.default})",
            envvar=variables[0] if len(variables) == 1 else variables,
            metavar=self.metavar,
            rich_help_panel=self.panel,
            callback=self.callback,
            is_eager=self.eager,
        )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[self.type | None, option],
        )


def taking(*groups: Sequence[Flag]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of ``groups`` beside its own parameters.

    The command is called with its own parameters and ``options``, a dict of the flags that were set
    (on the command line, in the environment or in the config file).
    """
    flags = [flag for group in groups for flag in group]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        parameters = [parameter for name, parameter in own.items() if name != "options"]
        parameters += [flag.parameter() for flag in flags]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            given = {flag.name: values.pop(flag.name) for flag in flags}
            command(**values, options={name: value for name, value in given.items() if value is not None})

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate
