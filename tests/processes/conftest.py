"""An engine with blocking calls, and SIGINT as its tests need it."""

import signal

import pytest
from helpers.blocking_engines import everything_is_given_back, simulated

from trioengine import blocking


@pytest.fixture
def engine():
    with blocking.Engine(simulated) as engine:
        yield engine
        engine.loop.call(everything_is_given_back, engine.loop.resource)
    assert not engine.loop._thread.is_alive()


@pytest.fixture(autouse=True)
def interruptible():
    """SIGINT interrupts, also where the tests were started in the background, where a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
