"""The variables of a session's chat template: set at its beginning, and between its requests."""

from dataclasses import replace

import pytest

from trioengine import EngineConfig, RequestRejected, SessionBusy, open_engine
from trioengine.aio.concurrency import open_unwrapped_nursery
from trioengine.testing import Simulation
from trioengine.testing.toy_model import toy_model
from trioengine.text.chat_template import ChatTemplate

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}|{{ mood or '' }}|"
ASKED = {"max_tokens": 3, "ignore_eos": True}


async def test_they_hold_for_the_requests_that_follow(autojump_clock):
    async with open_unwrapped_nursery() as nursery:
        simulation = Simulation(nursery)
        model = replace(toy_model(), chat_template=ChatTemplate(TEMPLATE))
        ports = replace(simulation.ports, read_model=lambda path: model)
        async with open_engine(EngineConfig(model="toy"), ports=ports) as engine:
            async with engine.open_session(chat_template_kwargs={"mood": "glad"}) as session:
                first = await session.ask("hello", **ASKED)
                session.set_chat_template_kwargs({"mood": "happy"})
                with pytest.raises(RequestRejected) as caught:
                    session.set_chat_template_kwargs({"messages": []})
                assert caught.value.param == "chat_template_kwargs"
                second = await session.ask("more", **ASKED)
                session.set_chat_template_kwargs({})
                third = await session.ask("more", **ASKED)
                contents = [message["content"] for message in session.history]
                async with session.generate("more", **ASKED):
                    with pytest.raises(SessionBusy):
                        session.set_chat_template_kwargs({})
    assert first.usage.prompt_tokens == len("hello|glad|")
    assert second.usage.prompt_tokens == len("".join(contents[:3]) + "|happy|")
    assert third.usage.prompt_tokens == len("".join(contents[:5]) + "||")
