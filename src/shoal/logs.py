"""Log set-up: one logger tree named ``shoal``, to stderr. Knows nothing of what is logged.

Libraries call ``logging.getLogger("shoal.<room>")``; only a command line (or a worker process)
calls :func:`configure`, so that importing shoal never touches the user's logging.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

__all__ = ["configure"]


class _JsonFormatter(logging.Formatter):
    """One JSON object a line: time (ISO 8601, UTC), level, logger, message, exception."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure(level: str = "info", log_format: str = "text", prefix: str = "") -> None:
    """Send shoal's log lines to stderr.

    Args:
        level: debug, info, warning or error.
        log_format: ``text`` or ``json`` (one object a line).
        prefix: put before each text line's message, e.g. ``"rank 1: "``.
    """
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s %(levelname)-7s {prefix}%(message)s", "%H:%M:%S")
        )
    root = logging.getLogger("shoal")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
