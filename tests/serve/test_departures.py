"""HTTP clients that go before they have their answer are counted, once; others are not."""

import logging

import pytest
import trio
from clients import read_all
from doors import asked, front_door
from trio.testing import memory_stream_pair

from trioengine.serve.departures import Departures
from trioengine.serve.http import json_response


@pytest.fixture
def departures():
    return Departures()


@pytest.fixture
def may_answer():
    return trio.Event()


@pytest.fixture
def slow(clients, departures, may_answer):
    """A front door with a route that answers when it may."""

    async def handler(request):
        await may_answer.wait()
        return json_response(200, {})

    return front_door(clients, "/slow", handler, departures)


async def test_an_http_client_that_goes_before_its_answer_is_counted(autojump_clock, slow, departures):
    async with asked(slow, "/slow"):
        pass
    assert departures.count == 1


async def test_an_http_client_that_has_its_answer_is_not_counted(autojump_clock, slow, departures, may_answer):
    async with asked(slow, "/slow") as stream:
        may_answer.set()
        assert (await read_all(stream)).startswith(b"HTTP/1.1 200 ")
    assert departures.count == 0


async def test_an_http_client_that_does_not_take_its_answer_is_counted(
    autojump_clock, slow, departures, may_answer, caplog
):
    caplog.set_level(logging.INFO, "trioengine")
    ours, theirs = memory_stream_pair()
    theirs.send_stream.send_all_hook = trio.sleep_forever
    async with asked(slow, "/slow", ours, theirs) as stream:
        may_answer.set()
        await read_all(stream, silence=100)
    assert departures.count == 1
