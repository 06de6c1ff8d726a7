"""The exception tree. Knows no other part of shoal.

ShoalError
├── UsageError (also ValueError)        the caller's input is wrong: exit status 2, HTTP 400
│   ├── ConfigError                     an engine option
│   ├── RequestError                    a field of one request
│   ├── ModelNotFoundError              no such model, or a folder without what is needed
│   ├── CheckpointError                 files that are there but damaged or inconsistent
│   └── UnsupportedError                understood, but not built (vision, adapters, GPTQ ...)
├── PlanError                           a plan that cannot be derived or does not prove
├── QueueFullError                      too many requests wait: HTTP 429
└── EngineError                         run time: exit status 1, HTTP 500 or 503
    ├── RankError                       a rank raised, died or hung
    │   └── RankMemoryError             a rank ran out of its device's memory
    └── EngineDeadError                 the engine gave up; carries the first cause
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "EngineDeadError",
    "EngineError",
    "ModelNotFoundError",
    "PlanError",
    "QueueFullError",
    "RankError",
    "RankMemoryError",
    "RequestError",
    "ShoalError",
    "UnsupportedError",
    "UsageError",
]


class ShoalError(Exception):
    """Base of everything shoal raises on purpose."""


class UsageError(ShoalError, ValueError):
    """The caller's input is wrong.

    Args:
        message: what is wrong and how to put it right.
        field: the option or request field at fault, by its public name, if one is.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ConfigError(UsageError):
    """An engine option is wrong or does not fit the machine."""


class RequestError(UsageError):
    """One request is wrong; nothing else is disturbed.

    Args:
        message: what is wrong and how to put it right.
        field: the request field at fault.
        index: which of the prompts given together it is, counted from 0; None if there is but one.
    """

    def __init__(self, message: str, field: str | None = None, index: int | None = None) -> None:
        super().__init__(message, field)
        self.index = index


class ModelNotFoundError(UsageError):
    """No model under that name, or a folder without config or weights."""


class CheckpointError(UsageError):
    """Checkpoint files exist but are damaged, or do not fit the model."""


class UnsupportedError(UsageError):
    """Recognised, and not built yet; refused by name rather than run wrongly."""


class PlanError(ShoalError):
    """No plan could be derived, or its proof failed."""


class QueueFullError(ShoalError):
    """The waiting queue is full.

    Args:
        message: what is full.
        retry_after_s: seconds after which trying again makes sense.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(ShoalError):
    """Something failed while running."""


class RankError(EngineError):
    """A rank raised, died or did not answer in time.

    Args:
        message: what happened.
        rank: which rank, if known.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class RankMemoryError(RankError):
    """A rank ran out of its device's memory."""


class EngineDeadError(EngineError):
    """The engine has stopped for good; no request will be answered."""
