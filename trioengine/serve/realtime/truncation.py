"""The setting `truncation`: how the prompt of a conversation that outgrows the context is cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from trioengine.core.bounds import number
from trioengine.core.sampling_params import Overflow
from trioengine.serve.fields import check_fixed, in_json, known_fields, shown
from trioengine.serve.problem import ClientError

_NAMES: Mapping[str, Overflow] = {"auto": "drop_oldest_turns", "disabled": "refuse"}
_RATIO = "retention_ratio"
_FIXED: Mapping[str, tuple[Any, ...]] = {"type": (_RATIO,), "token_limits": ()}


class Truncation(NamedTuple):
    """One that is validated; `shown` as the protocol has it."""

    shown: str | Mapping[str, Any] = "auto"
    overflow: Overflow = "drop_oldest_turns"
    retention_ratio: float = 1.0

    @property
    def is_lasting(self) -> bool:
        """Whether turns that one response leaves out are left out by those after it, too."""
        return not isinstance(self.shown, str)


AUTO = Truncation()


def parse_truncation(value: object, where: str) -> Truncation:
    """Null is `auto`. Raises ClientError."""
    if value is None:
        return AUTO
    if isinstance(value, str) and value in _NAMES:
        return Truncation(value, _NAMES[value])
    if not isinstance(value, Mapping):
        rule = f'must be "auto", "disabled" or an object of the type "{_RATIO}"'
        raise ClientError("unsupported_parameter", f"{where} {rule}, got {shown(value)}", param=where)
    return _retention(value, where)


def _retention(value: Mapping[str, Any], where: str) -> Truncation:
    fields = known_fields(value, {_RATIO, *_FIXED}, where)
    for name in ("type", _RATIO):
        if fields.get(name) is None:
            raise ClientError("missing_parameter", f"{where}.{name} is missing", param=f"{where}.{name}")
    check_fixed(fields, _FIXED, where)
    try:
        ratio = number(fields[_RATIO], 0, 1)
    except ValueError as exc:
        raise ClientError(
            "invalid_value", f"{where}.{_RATIO} {in_json(str(exc), fields[_RATIO])}", param=f"{where}.{_RATIO}"
        ) from None
    return Truncation({"type": _RATIO, _RATIO: ratio}, "drop_oldest_turns", ratio)
