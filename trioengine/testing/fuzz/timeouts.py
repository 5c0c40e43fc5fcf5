"""The errors of requests that their timeouts have ended."""

from __future__ import annotations

from trioengine.actors.generation import Generation
from trioengine.core.errors import TimedOut
from trioengine.core.types import Completion
from trioengine.testing.fuzz import inside


def partial_of(error: TimedOut) -> Completion:
    """The error of a request carries its partial answer."""
    assert error.completion is not None, f"a request timed out, and has no completion: {error!r}"
    return error.completion


def check_timed_out(error: TimedOut, generation: Generation | None) -> None:
    """It is raised of a request that its timeout has ended."""
    assert generation is not None, "only a request can time out"
    assert inside.is_timed_out(generation), f"{generation} ended otherwise, and got {error!r}"
    assert generation.outcome is not None, f"{generation} has no outcome, and raised {error!r}"
    completion = partial_of(error)
    assert completion == generation.completion, f"{completion} is not the completion: {generation.completion}"
    num_characters = len(completion.text)
    parts = " while ", "before any text", f" with {num_characters} character"
    stages = parts[2:] if num_characters else parts[:2]
    assert any(stage in str(error) for stage in stages), f"{num_characters} characters came, and {error!r}"
