"""Completions, chunks and outcomes are values."""

import dataclasses

import pytest

from trioengine.core.errors import Outcome
from trioengine.core.ledger import Ledger, RequestState
from trioengine.core.types import Cause, Chunk, Completion, FinishReason, Usage


def test_a_chunk_and_a_completion_are_values():
    completion = Completion(1, "hi", (7, 8), None, FinishReason.STOP, None, Usage(3, 2, 0, 0.0, 0.0))
    assert Chunk("hi", (7, 8)) == Chunk("hi", (7, 8), None)
    assert completion == dataclasses.replace(completion)
    with pytest.raises(dataclasses.FrozenInstanceError):
        completion.text = "ho"
    with pytest.raises(AttributeError):
        Chunk("hi", (7, 8)).text = "ho"


def test_a_completion_names_the_call_for_chunks():
    completion = Completion(1, "hi", (7, 8), None, FinishReason.STOP, None, Usage(3, 2, 0, 0.0, 0.0))
    with pytest.raises(TypeError, match=r"^a completion cannot be iterated over by `for`: .*`session.generate\(...\)`"):
        list(completion)


def test_an_abort_is_counted_by_its_cause():
    ledger = Ledger()
    ledger.receive()
    ledger.settle(RequestState.PREPARING, FinishReason.ABORT, Cause.TIMEOUT)
    ledger.check()
    assert ledger.aborted == 1
    assert ledger.abort_causes[Cause.TIMEOUT] == 1


@pytest.mark.parametrize("finish_reason", FinishReason)
def test_an_answer_that_came_to_its_own_end(finish_reason):
    assert Outcome(finish_reason).is_complete is (finish_reason.value in ("stop", "length", "tool_calls"))
