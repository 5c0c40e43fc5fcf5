"""Objects that each token of a stream touches have slots: their attributes lie in the object itself."""

import pytest

from trioengine.actors.attachment import WorkerAttachment
from trioengine.actors.generation import Generation
from trioengine.actors.request import Request
from trioengine.actors.request_times import RequestTimes, StepTimes
from trioengine.actors.session_actor import SessionActor
from trioengine.core.connection import _Attachment
from trioengine.core.messages import TokensRow
from trioengine.serve.body import Body, Sender
from trioengine.serve.chat_response import ChatFrames
from trioengine.serve.choices import _Sink
from trioengine.serve.completion_response import CompletionFrames
from trioengine.serve.response_bytes import ResponseBytes
from trioengine.text.output import Detokenizer, OutputText

TOUCHED = (
    *(TokensRow, _Attachment, SessionActor, WorkerAttachment, Request, OutputText, Detokenizer),
    *(RequestTimes, StepTimes),
    *(Generation, _Sink, ChatFrames, CompletionFrames, ResponseBytes, Body, Sender),
)


@pytest.mark.parametrize("kind", TOUCHED, ids=lambda kind: kind.__name__)
def test_no_instance_has_a_dictionary(kind):
    assert kind.__dictoffset__ == 0
