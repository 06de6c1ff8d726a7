"""Where shoal keeps what it made. Knows nothing of what is kept there."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["home"]


def home() -> Path:
    """shoal's cache folder: ``SHOAL_HOME``, else ``~/.cache/shoal``. Read at every call, not created."""
    named = os.environ.get("SHOAL_HOME")
    return (Path(named) if named else Path("~/.cache/shoal")).expanduser().absolute()
