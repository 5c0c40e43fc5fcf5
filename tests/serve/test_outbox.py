"""The events that a connection is going to send."""

import json

import pytest

from trioengine.serve.realtime.outbox import DeltaTemplate, Outbox

TEXTS = ["a", "", '"}\\', "\n\t\0", "ü😀", "\u2028", "</script>"]


@pytest.mark.parametrize("text", TEXTS)
async def test_an_event_that_was_rendered_once_is_like_any_other(text):
    """The text in it is quoted, and it has its number."""
    outbox = Outbox(send_timeout=1)
    fields = {"response_id": "resp_1", "item_id": text, "output_index": 0}
    template = DeltaTemplate("response.output_text.delta", **fields)
    outbox.put_delta(template, text)
    outbox.put("response.output_text.delta", **fields, delta=text)
    outbox.put_delta(template, text)
    events = [json.loads(event) for event in outbox._events]
    assert [event.pop("sequence_number") for event in events] == [0, 1, 2]
    assert len({event.pop("event_id") for event in events}) == 3
    assert events == [{"type": "response.output_text.delta", **fields, "delta": text}] * 3


async def test_two_connections_have_no_event_id_in_common():
    events = []
    for outbox in (Outbox(send_timeout=1), Outbox(send_timeout=1)):
        outbox.put("session.created")
        events.append(json.loads(outbox._events[0])["event_id"])
    assert events[0] != events[1]
