"""Natural mistakes in the use of `async with` are answered by one line that has the right form."""

import re
from functools import partial

import pytest
import trio
from helpers.misuses import awaited, entered, entered_by_async_with, iterated, iterated_over_by_async_for
from helpers.sides import SIDES, open_api

from trioengine import Engine, EngineConfig, InvalidConfig, connect, open_engine
from trioengine.actors.ports import Ports


@pytest.mark.parametrize("way", [awaited, entered])
@pytest.mark.parametrize(
    ("opening", "form"),
    [
        (lambda: open_engine("toy"), "use `async with open_engine(...) as engine`"),
        (lambda: connect("ws://localhost"), "use `async with connect(...) as client`"),
    ],
)
async def test_what_is_opened_is_entered_by_async_with(way, opening, form):
    with pytest.raises(TypeError, match=rf"\(\) cannot be {way.__name__}.*{re.escape(form)}$"):
        await way(opening())


@pytest.mark.parametrize("opening", [lambda: open_engine("toy"), lambda: connect("ws://localhost")])
async def test_what_is_not_opened_has_no_attributes(opening):
    with pytest.raises(AttributeError, match=r"\(\) has no attribute 'generate' before it is entered: use `async with"):
        opening().generate("x")


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("way", [awaited, entered])
async def test_a_session_is_entered_by_async_with(autojump_clock, side, way):
    form = re.escape(f"use `async with {side}.open_session() as session`")
    async with open_api(side) as api:
        with pytest.raises(TypeError, match=f"a session cannot be {way.__name__}.*: {form}$"):
            await way(api.open_session())


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("way", [awaited, entered, iterated])
async def test_a_generation_is_read_by_async_for(autojump_clock, side, way):
    form = re.escape("use `async with session.generate(...) as generation` to read it in chunks by `async for`, ")
    form += re.escape("or `await session.ask(...)` for the whole answer")
    async with open_api(side) as api, api.open_session() as session:
        with pytest.raises(TypeError, match=f"a generation cannot be {way.__name__}.*: {form}"):
            await way(session.generate("x"))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("way", [entered_by_async_with, iterated_over_by_async_for])
async def test_a_call_for_a_whole_answer_names_the_form_for_chunks(autojump_clock, side, way):
    form = re.escape("`async with session.generate(...) as generation`")
    async with open_api(side) as api, api.open_session() as session:
        for call in (api.generate, api.ask, session.ask):
            how = way.__name__.replace("_", " ")
            with pytest.raises(TypeError, match=rf"^{call.__name__}\(\) cannot be {how[:7]}.*{form}$"):
                await way(call("x"))


@pytest.mark.parametrize("side", SIDES)
async def test_a_call_for_a_whole_answer_is_a_coroutine(autojump_clock, side):
    async with open_api(side) as api, trio.open_nursery() as nursery:
        nursery.start_soon(partial(api.generate, "x", max_tokens=1))
        assert (await api.ask("x", max_tokens=1)).usage.completion_tokens == 1


def test_what_is_not_opened_shows_the_form():
    assert repr(open_engine("toy")).endswith("not entered: use `async with open_engine(...) as engine`>")


def test_an_engine_takes_no_more_threads_than_the_machine_can_run():
    ports = Ports(num_cores=2)
    Engine(EngineConfig(model="toy", num_threads=8), ports=ports)
    with pytest.raises(InvalidConfig, match=r"^num_threads must be at most 8 .*, got 1000$"):
        Engine(EngineConfig(model="toy", num_threads=1000), ports=ports)


def test_an_engine_is_made_of_a_configuration():
    with pytest.raises(InvalidConfig, match=r"^config must be an EngineConfig, got 'toy'; .*open_engine\(\.\.\.\)"):
        Engine("toy")


@pytest.mark.parametrize("name", ["generate", "ask"])
@pytest.mark.parametrize("side", SIDES)
async def test_a_forgotten_await_names_the_call(autojump_clock, side, name):
    async with open_api(side) as api:
        with pytest.warns(RuntimeWarning, match=rf"coroutine '\w+\.{name}' was never awaited") as warnings:
            getattr(api, name)("x")
        assert len(warnings) == 1
