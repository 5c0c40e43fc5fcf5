"""The events that a connection is going to send."""

import json

import pytest
import trio
from helpers.clients import held
from hypothesis import given
from hypothesis import strategies as st

from trioengine.serve.errors import ClientError
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


KEPT = 400_000  # characters
SIZES = st.sampled_from([0, 100, AT_ONCE, PART, 3 * PART, KEPT + 1])


class Wire(Pipe):
    """It takes so many writes, and then no more."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    async def send(self, messages):
        if len(self.writes) == self.count:
            await trio.sleep_forever()
        await super().send(messages)

    @property
    def numbers(self):
        """The numbers of the events that came whole."""
        text = "".join(data + "\n" * is_last for write in self.writes for data, is_last in write)
        return [json.loads(line)["sequence_number"] for line in text.splitlines(keepends=True) if line.endswith("\n")]


@given(st.lists(st.tuples(st.lists(SIZES, max_size=4), st.integers(0, 6), st.integers(0, 3)), max_size=8))
def test_each_event_comes_once_on_however_many_connections(rounds):
    """The client may forget the newest events that it has got; what it needs is sent, or refused as dropped."""
    trio.run(_some_connections, rounds, clock=trio.testing.MockClock(autojump_threshold=0))


async def _some_connections(rounds):
    account = held()
    outbox, seen, lengths = Outbox(send_timeout=20, held=account, max_kept=KEPT), [], []
    for sizes, num_writes, num_forgotten in rounds:
        lengths += [size + 150 for size in sizes]
        for size in sizes:
            outbox.put("event", text="x" * size)
        wire = Wire(num_writes)
        with trio.move_on_after(1):
            await outbox.send_to(wire)
        seen += wire.numbers
        assert seen == list(range(len(seen)))
        outbox.detach()
        assert account.num_bytes == outbox._size + outbox._sent_size
        assert outbox._sent_size == 0 or account.num_bytes <= KEPT
        with pytest.raises(ClientError):
            outbox.check(outbox._sequence_number)
        seen = seen[: max(0, len(seen) - num_forgotten)]
        if len(seen) < outbox._oldest:
            assert sum(lengths[len(seen) :]) > KEPT
            with pytest.raises(ClientError, match="the oldest event that is kept has the number"):
                outbox.check(len(seen) - 1)
            return
        outbox.check(len(seen) - 1)
        outbox.continue_after(len(seen) - 1)
    wire = Wire(-1)
    with trio.move_on_after(1):
        await outbox.send_to(wire)
    assert seen + wire.numbers == list(range(outbox._sequence_number))


async def test_a_write_that_ends_late_changes_nothing(autojump_clock):
    """Another connection has the same event meanwhile."""
    account = held()
    outbox, late, pipe = Outbox(send_timeout=20, held=account, max_kept=KEPT), SlowPipe(rate=10), Pipe()
    outbox.put("event")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outbox.send_to, late)
        await trio.sleep(1)
        outbox.detach()
        outbox.continue_after(-1)
        nursery.start_soon(outbox.send_to, pipe)
        await trio.sleep(30)
        nursery.cancel_scope.cancel()
    assert late.writes == pipe.writes != []
    assert (outbox._size, outbox._num_sent) == (0, 1)
    assert account.num_bytes == outbox._sent_size == len(pipe.writes[0][0][0])


async def test_no_producer_waits_for_a_client_that_is_away(autojump_clock):
    outbox = Outbox(send_timeout=20, held=held(), max_kept=KEPT)
    outbox.put("event", text="x" * KEPT)
    assert outbox.is_overfull
    with trio.move_on_after(1) as scope:
        await outbox.room()
    assert scope.cancelled_caught
    outbox.detach()
    await outbox.room()


async def test_no_more_is_kept_than_may_be_when_the_client_has_read_more_than_was_known(autojump_clock):
    """Its last write was not over when the client came back, which had read it."""
    account = held()
    outbox = Outbox(send_timeout=20, held=account, max_kept=KEPT)
    outbox.put("event", text="x" * KEPT)
    outbox.detach()
    outbox.continue_after(0)
    assert (account.num_bytes, outbox._sent_size) == (0, 0)
    with pytest.raises(ClientError, match="the oldest event that is kept has the number 1"):
        outbox.check(-1)
