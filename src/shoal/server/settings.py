"""What a server is told at its start. Knows no engine option: those are ``EngineConfig``'s."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.errors import ConfigError

__all__ = ["ServerSettings"]


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Options of the server itself.

    Raises:
        ConfigError: a value out of its range; ``field`` names it.
    """

    model: str  # as the user named it; the served name where no other is given
    served_model_names: tuple[str, ...] = ()  # what clients may call it; the first is the default
    host: str = "127.0.0.1"
    port: int = 8000  # 0 lets the system choose
    api_key: str | None = field(default=None, repr=False)  # None: no key is asked for
    request_timeout_s: float | None = None  # from arrival to the last token; None: no limit
    shutdown_timeout_s: float = 30.0  # for running requests after the first signal
    max_connections: int = 1024  # beyond which only /health and its like are answered
    max_body_bytes: int = 16 << 20  # of a request
    keep_alive_on_failure: bool = False  # once the engine gave up: stay, with /health at 503
    access_log: bool = False

    def __post_init__(self) -> None:
        self._check(0 <= self.port <= 65535, "port", "must lie in 0 .. 65535", self.port)
        self._check(self.api_key != "", "api_key", "must not be empty", self.api_key)
        timeout = self.request_timeout_s
        self._check(timeout is None or timeout > 0, "request_timeout", "must be above 0 seconds", timeout)
        self._check(
            self.shutdown_timeout_s >= 0,
            "shutdown_timeout",
            "must be at least 0 seconds",
            self.shutdown_timeout_s,
        )
        self._check(self.max_connections >= 1, "max_connections", "must be at least 1", self.max_connections)
        self._check(self.max_body_bytes >= 1, "max_body_bytes", "must be at least 1", self.max_body_bytes)
        self._check(all(self.served_model_names), "served_model_name", "must not be empty", "")

    @staticmethod
    def _check(ok: bool, field: str, message: str, value: object) -> None:
        if not ok:
            raise ConfigError(f"{field}: {message}, got {value!r}", field=field)

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which the model is served; at least one."""
        return self.served_model_names or (self.model,)
