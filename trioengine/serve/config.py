"""How an engine is served."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from trioengine.core.checks import MAX_COUNT, integer, is_key, number, path
from trioengine.core.config import MAX_SECONDS
from trioengine.core.errors import InvalidConfig
from trioengine.core.wording import brief
from trioengine.text.reasoning import REASONING_FORMS
from trioengine.text.tool_calls import FORMS

TOOL_CALL_PARSERS = ("auto", *FORMS)
REASONING_PARSERS = ("none", *REASONING_FORMS)
UNKNOWN_FIELDS = ("warn", "refuse")
MAX_PORT = 65535
MAX_BYTES = 1 << 50
MAX_BODY_SIZE, MAX_MESSAGE_SIZE = 4 << 20, 1 << 20  # bytes, of models for text
MAX_SIZE_WITH_IMAGES = 32 << 20  # an image of 20 MiB in base64, and room for others
_INTEGERS = {
    "port": (0, MAX_PORT),
    "max_connections": (1, MAX_COUNT),
    "max_sessions_per_key": (1, MAX_COUNT),
    "max_body_size": (0, MAX_COUNT),
    "max_header_size": (1 << 10, 64 << 10),  # WebSocket libraries want it in one piece
    "max_message_size": (1, MAX_COUNT),
    "max_conversation_size": (1, MAX_COUNT),
    "max_buffered_bytes": (1, MAX_BYTES),
    "max_buffered_bytes_per_key": (1, MAX_BYTES),
}
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")
_PATHS = {"weights_dir": "a directory", "ssl_certfile": "a file", "ssl_keyfile": "a file"}
_OPTIONAL = ("max_body_size", "max_message_size")
_SECONDS = ("handshake_timeout", "body_timeout", "idle_timeout", "client_ping_interval", "send_timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The limits of one client's connection: a part of ServeConfig."""

    max_body_size: int | None = None  # bytes; None: 4 MiB, or 32 MiB where the model takes images
    max_header_size: int = 32 << 10  # bytes of a request's head
    max_message_size: int | None = None  # bytes of a WebSocket message; None: 1 MiB, or 32 MiB with images
    max_conversation_size: int = 8 << 20  # bytes in memory of the items of a WebSocket's conversation
    handshake_timeout: float = 10.0  # for a request's head
    body_timeout: float = 60.0
    idle_timeout: float = 300.0  # between two requests
    client_ping_interval: float = 20.0  # of WebSockets; the answer may take as long
    send_timeout: float = 20.0  # a client that does not read for so long has disconnected

    def largest_body(self, *, takes_images: bool) -> int:
        """Bytes of a request's body, to a model that takes images or does not."""
        return _size(self.max_body_size, MAX_BODY_SIZE, takes_images=takes_images)

    def largest_message(self, *, takes_images: bool) -> int:
        """Bytes of a WebSocket message, to a model that takes images or does not."""
        return _size(self.max_message_size, MAX_MESSAGE_SIZE, takes_images=takes_images)


def _size(configured: int | None, default: int, *, takes_images: bool) -> int:
    if configured is not None:
        return configured
    return MAX_SIZE_WITH_IMAGES if takes_images else default


@dataclass(frozen=True, slots=True)
class ServeConfig(ConnectionLimits):
    """How an engine is served; InvalidConfig names the field that cannot be used. Times are in seconds.

    A key is never shown, neither in `repr` nor in an error.
    """

    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    served_model_name: str | None = None  # the model's name for clients; None: the name in the engine's configuration
    api_key: tuple[str, ...] = dataclasses.field(default=(), repr=False)  # any of them will do
    admin_key: tuple[str, ...] = dataclasses.field(default=(), repr=False)  # for operators; valid on all routes
    allowed_origin: tuple[str, ...] = ()  # web pages of other sites that may ask, as https://example.com
    allowed_host: tuple[str, ...] = ()  # names and addresses that a Host header may have; empty: see `Origins`
    root_path: str = ""  # a prefix under which a proxy serves the routes, as /llm
    ssl_certfile: str | None = None  # a certificate chain in PEM: the port speaks TLS
    ssl_keyfile: str | None = None  # its key; None: in the same file
    weights_dir: str | None = None  # where the checkpoints lie that /update_weights may name
    unknown_fields: str = "warn"  # or "refuse": fields of a request that this server does not know
    tool_call_parser: str = "auto"  # the form of tool calls: hermes, llama3, json; auto: as the template shows it
    reasoning_parser: str = "none"  # the form of reasoning: deepseek_r1, qwen3; none: it is part of the text
    insecure: bool = False  # serve all clients of all machines, without any key
    shutdown_timeout: float = 30.0  # that requests have after the first SIGTERM or SIGINT
    max_connections: int = 4096  # at a time; one that waits makes room for more, or they are answered with 503
    max_sessions_per_key: int = 64  # WebSockets and choices of a key at a time; more are answered with 429
    max_buffered_bytes: int = 1 << 30  # of bodies and of WebSocket connections; more are answered with 503
    max_buffered_bytes_per_key: int = 256 << 20  # the same of one key; more are answered with 429

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise InvalidConfig.of("host", f"must be a name or an address, got {brief(self.host)}")
        name = self.served_model_name
        if name is not None and not (isinstance(name, str) and name):
            raise InvalidConfig.of("served_model_name", f"must be a name, got {brief(name)}")
        for field, kind in _PATHS.items():
            if getattr(self, field) is not None:
                self._validate(field, path, kind)
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            message = "ssl_keyfile is the key of an ssl_certfile: give both"
            raise InvalidConfig(message, fields=("ssl_keyfile", "ssl_certfile"))
        if self.unknown_fields not in UNKNOWN_FIELDS:
            names = " or ".join(UNKNOWN_FIELDS)
            raise InvalidConfig.of("unknown_fields", f"must be {names}, got {brief(self.unknown_fields)}")
        if self.tool_call_parser not in TOOL_CALL_PARSERS:
            names = ", ".join(TOOL_CALL_PARSERS)
            raise InvalidConfig.of("tool_call_parser", f"must be one of {names}, got {brief(self.tool_call_parser)}")
        if self.reasoning_parser not in REASONING_PARSERS:
            names = ", ".join(REASONING_PARSERS)
            raise InvalidConfig.of("reasoning_parser", f"must be one of {names}, got {brief(self.reasoning_parser)}")
        if not isinstance(self.insecure, bool):
            raise InvalidConfig.of("insecure", f"must be True or False, got {brief(self.insecure)}")
        for field in ("api_key", "admin_key"):
            self._validate_strings(field, is_key, "must be keys of visible ASCII characters; they are not shown here")
        self._validate_strings("allowed_origin", _is_origin, "must be origins such as https://example.com", shown=True)
        self._validate_strings("allowed_host", _is_host, "must be names or addresses without a port", shown=True)
        if not isinstance(self.root_path, str) or not _ROOT_PATH.fullmatch(self.root_path):
            rule = "must be a path such as /llm, without a slash at its end"
            raise InvalidConfig.of("root_path", f"{rule}, got {brief(self.root_path)}")
        for field, bounds in _INTEGERS.items():
            if not (field in _OPTIONAL and getattr(self, field) is None):
                self._validate(field, integer, *bounds)
        for field in _SECONDS:
            self._validate(field, partial(number, above=True), 0, MAX_SECONDS)
        self._validate("shutdown_timeout", number, 0, MAX_SECONDS)
        self._check_insecure()

    @property
    def has_keys(self) -> bool:
        """Whether clients need a key at all."""
        return bool(self.api_key or self.admin_key)

    def _check_insecure(self) -> None:
        """Raise InvalidConfig where keys are configured, and would not be asked for."""
        keys = [field for field in ("api_key", "admin_key") if getattr(self, field)]
        if self.insecure and keys:
            message = f"insecure serves all clients without a key, and {keys[0]} is set: give one of them"
            raise InvalidConfig(message, fields=("insecure", keys[0]))

    def _validate(self, name: str, check: Callable[..., object], *bounds: int | str) -> None:
        try:
            object.__setattr__(self, name, check(getattr(self, name), *bounds))
        except ValueError as exc:
            raise InvalidConfig.of(name, str(exc)) from None

    def _validate_strings(
        self, name: str, is_good: Callable[[object], bool], rule: str, *, shown: bool = False
    ) -> None:
        """One string, or a sequence of them; the first bad one is in the error if it may be `shown`."""
        value = getattr(self, name)
        values = (value,) if isinstance(value, str) else value
        bad = [item for item in values if not is_good(item)] if isinstance(values, tuple | list) else [values]
        if bad:
            raise InvalidConfig.of(name, f"{rule}, got {brief(bad[0])}" if shown else rule)
        object.__setattr__(self, name, tuple(values))


def _is_host(value: object) -> bool:
    """A name or an address without a port; an IPv6 address may stand in brackets, as in a Host header."""
    if not isinstance(value, str):
        return False
    is_bracketed = value.startswith("[") and value.endswith("]")
    address = value[1:-1] if is_bracketed else value
    try:
        return "%" not in address and bool(ipaddress.IPv6Address(address))
    except ValueError:
        return _HOST_NAME.fullmatch(value) is not None


def _is_origin(value: object) -> bool:
    """Scheme and authority in lower case, as browsers send them: it is compared as a whole."""
    if not isinstance(value, str) or not value.isascii() or value != value.lower():
        return False
    scheme, separator, authority = value.partition("://")
    return bool(scheme and separator and authority) and not set(authority) & set("/?#@ ")
