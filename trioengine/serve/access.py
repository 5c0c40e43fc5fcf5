"""Who may come in. Without a key only loopback names are served, so that no web page can reach the engine by DNS."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from typing import TypeAlias
from urllib.parse import urlsplit

Headers: TypeAlias = Iterable[tuple[bytes, bytes]]
Access: TypeAlias = Callable[[Headers], str | None]  # why a request is refused; None: it is not


def is_loopback(host: str) -> bool:
    """Whether a name or an address without a port stands for this machine alone."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def loopback_only(headers: Headers) -> str | None:
    """Refuse a Host, or an Origin where there is one, that is not this machine."""
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) != 1 or not is_loopback(_host_of("//" + hosts[0].decode("latin-1"))):
        return "the Host header must name localhost: there is no key"
    origins = [value for name, value in headers if name == b"origin"]
    if not all(is_loopback(_host_of(origin.decode("latin-1"))) for origin in origins):
        return "the Origin must be localhost: there is no key"
    return None


def anyone(headers: Headers) -> str | None:
    """`--insecure`: whoever can connect may come in."""
    return None


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
