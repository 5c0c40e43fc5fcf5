"""The events that a connection is going to send."""

import json

import pytest
import trio
from helpers.clients import held

from trioengine.serve.realtime.outbox import AT_ONCE, PART, DeltaTemplate, Outbox

TEXTS = ["a", "", '"}\\', "\n\t\0", "ü😀", "\u2028", "</script>"]


@pytest.mark.parametrize("text", TEXTS)
async def test_an_event_that_was_rendered_once_is_like_any_other(text):
    """The text in it is quoted, and it has its number."""
    outbox = Outbox(send_timeout=1, held=held())
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
    for outbox in (Outbox(send_timeout=1, held=held()), Outbox(send_timeout=1, held=held())):
        outbox.put("session.created")
        events.append(json.loads(outbox._unsent[0].data)["event_id"])
    assert events[0] != events[1]


class Pipe:
    """What is written to it at once."""

    def __init__(self):
        self.writes = []

    async def send(self, messages):
        await trio.lowlevel.checkpoint()
        self.writes.append([(message.data, message.message_finished) for message in messages])


async def test_what_is_put_at_once_is_written_at_once(autojump_clock):
    """Small events together, up to so many characters; long ones in parts."""
    outbox, pipe = Outbox(send_timeout=1, held=held()), Pipe()
    sizes = [10, 20, PART, 30, AT_ONCE // 2, AT_ONCE // 2, 40]
    for size in sizes:
        outbox.put("event", text="x" * size)
    with trio.move_on_after(1):
        await outbox.send_to(pipe)
    last = [[is_last for _, is_last in write] for write in pipe.writes]
    assert last == [[True, True], [False], [True, True, True], [True, True]]
    whole = "".join(text + "\n" * is_last for write in pipe.writes for text, is_last in write)
    assert [len(json.loads(line)["text"]) for line in whole.splitlines()] == sizes


class SlowPipe(Pipe):
    """It takes so many characters a second."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    async def send(self, messages):
        await trio.sleep(sum(len(message.data) for message in messages) / self.rate)
        await super().send(messages)


async def test_a_client_that_reads_slowly_is_not_held_up_for_long(autojump_clock):
    """It reads 2,000 characters a second of more than it can read, for minutes."""
    outbox, pipe = Outbox(send_timeout=20, held=held()), SlowPipe(rate=2000)
    template = DeltaTemplate("response.output_text.delta", response_id="resp_1")
    longest = 0.0
    with trio.move_on_after(300):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outbox.send_to, pipe)
            while True:
                began = trio.current_time()
                await outbox.room()
                longest = max(longest, trio.current_time() - began)
                outbox.put_delta(template, "word")
    assert 0.0 < longest <= AT_ONCE / 2000
