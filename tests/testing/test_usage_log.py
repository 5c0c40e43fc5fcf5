"""The times that observers get of a request: from its beginning to a token that has come, and between two tokens."""

import pytest
import trio
from trio.testing import MockClock

from trioengine.actors.observer import FinishedRequest
from trioengine.testing.fuzz.usage_log import UsageLog


def finish(seconds, decode_seconds, *, ended_after):
    """Observe a request whose tokens come after 1 s and 3 s, and that ends so many seconds after the second one."""
    clock = MockClock()

    async def observe():
        log = UsageLog()
        log.request_created(None)
        clock.jump(1.0)
        log.first_token(1.0, None)
        clock.jump(2.0)
        log.next_tokens([2.0])
        clock.jump(ended_after)
        log.request_finished(
            FinishedRequest(
                seconds=seconds,
                decode_seconds=decode_seconds,
                prompt_tokens=3,
                generation_tokens=2,
            )
        )

    trio.run(observe, clock=clock)


@pytest.mark.parametrize("ended_after", [0.0, 5.0])
def test_a_request_lasts_until_its_latest_token(ended_after):
    """The engine may end an answer, by a stop string or a deadline, long after its latest token."""
    finish(3.0, 2.0, ended_after=ended_after)


@pytest.mark.parametrize(("seconds", "decode_seconds"), [(4.0, 2.0), (2.0, 2.0), (3.0, 1.0), (3.0, 3.0), (2.0, 3.0)])
def test_other_times_are_findings(seconds, decode_seconds):
    with pytest.raises(AssertionError, match="times"):
        finish(seconds, decode_seconds, ended_after=5.0)
