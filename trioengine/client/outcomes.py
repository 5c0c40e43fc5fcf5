"""What a response.done says, as an outcome."""

from __future__ import annotations

from typing import Any

from trioengine.client.problems import abort_cause, error_of
from trioengine.core.errors import EngineError, Outcome
from trioengine.core.types import Cause, FinishReason, Usage


def outcome_of(response: dict[str, Any], cause: Cause | None, problem: EngineError | None) -> Outcome:
    """`cause` is that of an abort that was asked for, `problem` what an error event said of the response."""
    match response["status"]:
        case "completed":
            return Outcome(FinishReason.STOP)
        case "incomplete":
            return Outcome(FinishReason.LENGTH)
        case "failed":
            failure = response["status_details"]["error"]
            aborted_by = abort_cause(failure)
            if aborted_by is None:
                return Outcome(FinishReason.ERROR, error=problem or error_of(failure))
            return Outcome(FinishReason.ABORT, aborted_by)
        case _:
            return Outcome(FinishReason.ABORT, cause or Cause.CLIENT)


def usage_of(response: dict[str, Any]) -> Usage:
    usage = response.get("usage") or {}
    cached = (usage.get("input_token_details") or {}).get("cached_tokens", 0)
    return Usage(usage.get("input_tokens", 0), usage.get("output_tokens", 0), cached)


def length_of(response: dict[str, Any]) -> int:
    """Characters of the answer, as the server has it."""
    return sum(len(part["text"]) for item in response["output"] for part in item["content"])
