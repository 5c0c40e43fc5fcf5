"""The environment of child processes."""

from __future__ import annotations

from collections.abc import Mapping


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy without the variables of options that hold keys: TRIOENGINE_API_KEY, TRIOENGINE_ADMIN_KEY.

    /proc/PID/environ shows a process's first environment as long as it lives, and no child needs a key.
    """
    return {name: value for name, value in environment.items() if not _holds_keys(name)}


def _holds_keys(name: str) -> bool:
    """Match every option that is named after a key, so that a new one is left out as well."""
    return name.startswith("TRIOENGINE_") and name.endswith("_KEY")
