"""The events that a connection is going to send."""

import json

import pytest
import trio
from trio_websocket import ConnectionClosed

from trioengine.serve.realtime.outbox import PART, DeltaTemplate, Outbox

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
    events = [json.loads(message.data) for message in outbox._unsent]
    assert [event.pop("sequence_number") for event in events] == [0, 1, 2]
    assert len({event.pop("event_id") for event in events}) == 3
    assert events == [{"type": "response.output_text.delta", **fields, "delta": text}] * 3


async def test_two_connections_have_no_event_id_in_common():
    events = []
    for outbox in (Outbox(send_timeout=1), Outbox(send_timeout=1)):
        outbox.put("session.created")
        events.append(json.loads(outbox._unsent[0].data)["event_id"])
    assert events[0] != events[1]


class Pipe:
    """What is written to it at once, until it has so many writes; then it is closed."""

    def __init__(self, num_writes):
        self.writes = []
        self.num_writes = num_writes

    async def send(self, messages):
        await trio.lowlevel.checkpoint()
        if len(self.writes) == self.num_writes:
            raise ConnectionClosed(None)
        self.writes.append([(message.data, message.message_finished) for message in messages])


async def test_what_is_put_at_once_is_written_at_once_as_far_as_a_part_goes(autojump_clock):
    outbox, pipe = Outbox(send_timeout=1), Pipe(num_writes=10)
    sizes = [10, 20, 2 * PART, 30, PART, 40]
    for size in sizes:
        outbox.put("event", text="x" * size)
    with trio.move_on_after(1):
        await outbox.send_to(pipe)
    last = [[is_last for _, is_last in write] for write in pipe.writes]
    assert last == [[True, True], [False], [False], [True, True], [False], [True, True]]
    whole = "".join(text + "\n" * is_last for write in pipe.writes for text, is_last in write)
    assert [len(json.loads(line)["text"]) for line in whole.splitlines()] == sizes


async def test_nobody_waits_until_everything_is_sent_on_a_websocket_that_is_closed(autojump_clock):
    outbox = Outbox(send_timeout=1)
    outbox.put("event")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outbox.flushed)
        await trio.testing.wait_all_tasks_blocked()
        await outbox.send_to(Pipe(num_writes=0))
    outbox.put("event")
    with trio.fail_after(1):
        await outbox.flushed()
