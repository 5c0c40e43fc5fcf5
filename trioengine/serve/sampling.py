"""A client's sampling parameters, by the names of its protocol, as the engine takes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trioengine.core.errors import RequestRejected
from trioengine.core.sampling_params import SamplingParams
from trioengine.serve.fields import in_json, is_number
from trioengine.serve.problem import ClientError

SAMPLING = {  # the names that every protocol shares with us, and ours
    name: name
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "stop",
        "stop_token_ids",
        "min_tokens",
        "ignore_eos",
        "logit_bias",
        "skip_special_tokens",
        "cache_salt",
    )
}
_TYPES: Mapping[str, tuple[type, ...]] = {  # as JSON has them, by our names; the others are numbers
    "stop": (str, list),
    "stop_token_ids": (list,),
    "ignore_eos": (bool,),
    "logit_bias": (Mapping,),
    "skip_special_tokens": (bool,),
    "cache_salt": (str,),
}
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


def sampling_params(given: Mapping[str, Any], names: Mapping[str, str], where: str = "") -> SamplingParams:
    """From what the client has `given`, of whose `names` each has ours. Raises ClientError in the client's names."""
    prefix = f"{where}." if where else ""
    values = {names[name]: _value(name, value, prefix) for name, value in given.items()}
    try:
        return SamplingParams(**values)
    except RequestRejected as exc:
        name = next((name for name in given if names[name] == exc.param), exc.param)
        problem = in_json(exc.message, given.get(str(name))).replace(str(exc.param), str(name), 1)
        code = exc.code if _has_its_type(values.get(str(exc.param)), exc.param) else "invalid_type"
        raise ClientError(code, f"{prefix}{problem}", param=f"{prefix}{name}") from exc


def _has_its_type(value: object, name: str | None) -> bool:
    return isinstance(value, types) if (types := _TYPES.get(str(name))) is not None else is_number(value)


def _value(name: str, value: Any, prefix: str) -> Any:
    """JSON has no integers as keys."""
    if name != "logit_bias" or not isinstance(value, Mapping):
        return value
    if not all(_TOKEN_ID.fullmatch(token_id) for token_id in value):
        param = f"{prefix}logit_bias"
        raise ClientError("invalid_value", f"{param} must map token ids to numbers", param=param)
    return {int(token_id): bias for token_id, bias in value.items()}
