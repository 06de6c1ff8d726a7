"""The config file: a YAML mapping from a command's long option names to values. Knows no particular option.

Its values take the place of the command's defaults, so the environment and the command line win.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
import yaml

from shoal.errors import ConfigError

__all__ = ["read_config_file"]


def read_config_file(ctx: typer.Context, path: Path | None) -> Path | None:
    """An eager typer callback: make the file's values the command's defaults.

    Raises:
        ConfigError: unreadable, not a mapping, or a key that is not an option of this command.
    """
    if path is not None and not ctx.resilient_parsing:
        known = _keys_of(ctx)
        values: dict[str, Any] = {}
        for key, value in _load(path).items():
            parameter = known.get(str(key).replace("-", "_"))
            if parameter is None:
                raise ConfigError(f"{path}: {key}: not an option of {ctx.info_name}", field=str(key))
            if parameter.name in values:
                raise ConfigError(f"{path}: {key}: given twice", field=str(key))
            if value is not None:
                values[parameter.name] = _as_typed(
                    f"{path}: {key}", value, getattr(parameter, "multiple", False)
                )
        ctx.default_map = values
    return path


def _load(path: Path) -> dict[Any, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must be a mapping from options to values")
    return content


def _keys_of(ctx: typer.Context) -> dict[str, Any]:
    """Every key the file may have (long spellings, underscores for hyphens), and its parameter."""
    keys = {}
    for parameter in ctx.command.params:
        if parameter.name not in ("config", "help"):
            spellings = [spelling[2:] for spelling in parameter.opts if spelling.startswith("--")]
            keys.update({name.replace("-", "_"): parameter for name in (parameter.name or "", *spellings)})
    return keys


def _as_typed(where: str, value: Any, is_list: bool) -> Any:
    """The value as text, as if typed on the command line, so that it is checked the same way there."""
    if is_list:
        return [_as_typed(where, item, False) for item in (value if isinstance(value, list) else [value])]
    if not isinstance(value, (str, int, float)):
        raise ConfigError(f"{where}: must be text, a number, or true or false")
    return str(value)
