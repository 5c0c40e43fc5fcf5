"""The end of a response whose answer has come into a call, and not to its arguments."""

import json

import pytest
from helpers.clients import held

from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import Cause, Completion, FinishReason, Usage
from trioengine.serve.realtime.outbox import Outbox
from trioengine.serve.realtime.prompt import ChatPrompt
from trioengine.serve.realtime.response import Response, ResponseSpec
from trioengine.serve.realtime.settings import AUTO
from trioengine.text.tool_calls import HERMES

BEGUN = '<tool_call>\n{"name": "clo'


def completion(finish_reason, cause):
    return Completion(
        request_id=1,
        text="",
        token_ids=(),
        logprobs=None,
        finish_reason=finish_reason,
        cause=cause,
        usage=Usage(1, 1, 0),
    )


@pytest.mark.parametrize("text", ["", "I look."])
@pytest.mark.parametrize(
    ("finish_reason", "cause", "shown"),
    [
        (FinishReason.LENGTH, None, BEGUN),
        (FinishReason.ABORT, Cause.CLIENT, ""),
        (FinishReason.ABORT, Cause.SHUTDOWN, ""),
    ],
)
def test_the_beginning_of_a_call(text, finish_reason, cause, shown):
    """It is left out if the answer was aborted, and text otherwise."""
    outbox = Outbox(send_timeout=1, held=held())
    spec = ResponseSpec(ChatPrompt([], [], {}), SamplingParams(), AUTO, "inf", tool_form=HERMES)
    response = Response(spec, outbox, conversation_id=None, items=None)
    response.begin()
    response.output.begin()
    response.output.add(text + BEGUN)
    response.finish(completion(finish_reason, cause))
    (message,) = response.to_json()["output"]
    assert (message["content"][0]["text"], message["status"]) == (text + shown, "incomplete")
    events = [json.loads(event.data) for event in outbox._unsent]
    assert "".join(event["delta"] for event in events if event["type"].endswith(".delta")) == text + shown
