"""How an engine is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trioengine.core.bounds import MAX_COUNT, brief, integer, number
from trioengine.core.config import MAX_SECONDS
from trioengine.core.errors import InvalidConfig

MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """How an engine is served; InvalidConfig names the field that cannot be used. Times are in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    served_model_name: str | None = None  # what clients call the model; None: as the engine's configuration does
    shutdown_timeout: float = 30.0  # that requests have after the first SIGTERM or SIGINT
    max_connections: int = 4096  # at a time; more are answered with 503
    insecure: bool = False  # serve other machines, too, whoever they are

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise InvalidConfig(f"host must be a name or an address, got {brief(self.host)}")
        name = self.served_model_name
        if name is not None and not (isinstance(name, str) and name):
            raise InvalidConfig(f"served_model_name must be a name, got {brief(name)}")
        if not isinstance(self.insecure, bool):
            raise InvalidConfig(f"insecure must be True or False, got {brief(self.insecure)}")
        self._validate("port", integer, 0, MAX_PORT)
        self._validate("max_connections", integer, 1, MAX_COUNT)
        self._validate("shutdown_timeout", number, 0, MAX_SECONDS)

    def _validate(self, name: str, check: Callable[..., object], *bounds: int) -> None:
        try:
            object.__setattr__(self, name, check(getattr(self, name), *bounds))
        except ValueError as exc:
            raise InvalidConfig(f"{name} {exc}") from None
