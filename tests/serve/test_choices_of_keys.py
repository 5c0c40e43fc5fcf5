"""Each choice of a request counts among the sessions of its key."""

import pytest
import trio
from helpers.clients import CHAT, chat, first_token, open_clients

from trioengine.serve.errors import OverBudget
from trioengine.serve.key_sessions import KeySessions

COMPLETIONS = "/v1/completions"
KEY, OTHER = "k" * 16, "o" * 16
KEYS = {"api_key": (KEY, OTHER)}


def bearer(key=KEY):
    return {"authorization": f"Bearer {key}"}


def counts(clients):
    """How many sessions are open."""
    return sum(clients.server.connections._access._sessions._counts.values())


async def test_choices_are_sessions_of_the_key(autojump_clock):
    async with open_clients(max_sessions_per_key=4, **KEYS) as clients, clients.connect() as client:
        await client.send("POST", CHAT, chat(n=3, max_tokens=200), **bearer())
        await first_token(clients.engine)
        assert counts(clients) == 3
        refused = await clients.request("POST", CHAT, chat(n=2), **bearer())
        assert (refused.status, refused.error["code"]) == (429, "too_many_sessions")
        assert refused.error["message"] == "this key already has 4 requests, choices or connections open (the limit)"
        assert (await clients.request("POST", CHAT, chat(), **bearer())).status == 200
        assert (await clients.request("POST", CHAT, chat(n=4), **bearer(OTHER))).status == 200
        assert len((await client.answer()).json["choices"]) == 3
        assert (await clients.request("POST", CHAT, chat(n=4), **bearer())).status == 200


async def test_more_choices_than_the_key_ever_has_sessions(autojump_clock):
    async with open_clients(max_sessions_per_key=2, **KEYS) as clients:
        answer = await clients.request("POST", CHAT, chat(n=3), **bearer())
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_value", "n")
        assert answer.error["message"] == "n must be at most 2 (--max-sessions-per-key), got 3"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_further_prompts_wait_for_sessions(autojump_clock, n, stream):
    fields = {"prompt": [f"to be {number}" for number in range(5)], "max_tokens": 20, "temperature": 0, "n": n}
    async with open_clients(max_sessions_per_key=2, **KEYS) as clients:
        found, done = [], trio.Event()

        async def watch():
            while not done.is_set():
                found.append(counts(clients))
                await clients.engine.runtime.gate.changed()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            answer = await clients.request("POST", COMPLETIONS, {**fields, "stream": stream}, **bearer())
            nursery.cancel_scope.cancel()
        assert answer.status == 200 and max(found) == 2
        events = answer.events[:-1] if stream else [answer.json]
        assert {choice["index"] for event in events for choice in event["choices"]} == {*range(5 * n)}


async def test_a_request_goes_on_where_others_have_all_other_sessions(autojump_clock):
    fields = {"prompt": ["a", "b", "c"], "max_tokens": 5, "temperature": 0}
    async with open_clients(max_sessions_per_key=2, **KEYS) as clients:
        async with clients.realtime(extra_headers=[(b"Authorization", b"Bearer " + KEY.encode())]):
            answer = await clients.request("POST", COMPLETIONS, fields, **bearer())
            assert len(answer.json["choices"]) == 3


async def test_a_failure_gives_all_back(autojump_clock):
    async with open_clients(max_sessions_per_key=3, **KEYS) as clients:
        for fields in ({"prompt": ["a", "b"], "n": 3, "logit_bias": {"9999999": 1}}, {"prompt": "x" * 600, "n": 2}):
            assert (await clients.request("POST", COMPLETIONS, fields, **bearer())).status == 400
        assert (await clients.request("POST", COMPLETIONS, {"prompt": "a", "n": 3}, **bearer())).status == 200


def test_nothing_is_taken_that_is_refused():
    sessions = KeySessions(3)
    with sessions.holding(b"a") as one, sessions.holding(b"a"):
        with pytest.raises(OverBudget, match="has 2 requests, choices or connections open of 3, and n is 3"):
            one.claim(3)
        assert sessions.left(b"a") == 1
        one.claim(2)
        assert (sessions.left(b"a"), one.num_held) == (0, 2)
    assert (len(sessions), list(sessions)) == (0, [])
