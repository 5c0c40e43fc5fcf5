"""A client with a key of its own guesses a prompt of another key, token by token, by `cached_tokens`.

A guess is right where one more token of it is found in the prefix cache than of the wrong ones. The prompt's secret
lies in the middle of a block, and a guess never fills a block, so that guesses leave nothing behind.
"""

import json
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import memory_stream_pair

from trioengine.core.messages import AddMessage
from trioengine.serve.config import ServeConfig
from trioengine.serve.server import Server
from trioengine.testing import simulated_engine
from trioengine.testing.toy_model import VOCAB_SIZE
from trioengine.worker.scheduling.sequence import Limits

VICTIM, ATTACKER, ADMIN = "sk-victim", "sk-attacker", "sk-admin"
PIN = "4711"
SECRET = f"My PIN is {PIN}. Remember it, and let it be a secret that stays between the two of us."
LIMITS = Limits(
    vocab_size=VOCAB_SIZE,
    max_model_len=512,
    kv_blocks_total=64,
    block_size=64,
    max_num_seqs=8,
    max_num_batched_tokens=64,
)


@asynccontextmanager
async def serving(**options):
    """A function that asks the server, and the messages that its worker received."""
    async with simulated_engine(limits=LIMITS) as (engine, simulation), trio.open_nursery() as nursery:
        server = Server(engine, ServeConfig(**{"served_model_name": "toy"} | options))

        async def cached_tokens(content, key=None, **fields):
            """How many tokens of a chat completion's prompt were found in the prefix cache."""
            ours, theirs = memory_stream_pair()
            nursery.start_soon(server.connections.handle, theirs)
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}
            answer = await _exchange(ours, json.dumps(body).encode(), key)
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        yield cached_tokens, simulation.worker.received


async def _exchange(stream, body, key):
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    head += "Connection: close\r\n" if key is None else f"Connection: close\r\nAuthorization: Bearer {key}\r\n"
    await stream.send_all(f"{head}\r\n".encode() + body)
    answer = b""
    while received := await stream.receive_some():
        answer += received
    await stream.aclose()
    return json.loads(answer.partition(b"\r\n\r\n")[2])


async def recovered(cached_tokens, *args, **fields):
    """The PIN as 40 requests recover it; "?" for a digit of which all guesses look alike."""
    known = ""
    for _ in PIN:
        counts = [await cached_tokens(f"My PIN is {known}{digit}", *args, **fields) for digit in "0123456789"]
        known += str(counts.index(max(counts))) if min(counts) < max(counts) else "?"
    return known


@pytest.mark.parametrize("attacker", [ATTACKER, ADMIN])
async def test_a_key_cannot_recover_the_prompt_of_another_key(autojump_clock, attacker):
    async with serving(api_key=(VICTIM, ATTACKER), admin_key=ADMIN) as (cached_tokens, _):
        await cached_tokens(SECRET, VICTIM)
        assert await recovered(cached_tokens, attacker) == "????"
        assert await cached_tokens(SECRET, attacker) == 0


async def test_the_same_key_shares_its_prompts(autojump_clock):
    """The attack works within a key, so it would be seen between keys."""
    async with serving(api_key=(VICTIM, ATTACKER)) as (cached_tokens, _):
        assert await cached_tokens(SECRET, VICTIM) == 0
        assert await cached_tokens(SECRET, VICTIM) == 64
        assert await recovered(cached_tokens, VICTIM) == PIN


async def test_a_cache_salt_separates_users_of_one_key(autojump_clock):
    async with serving(api_key=(VICTIM, ATTACKER)) as (cached_tokens, _):
        await cached_tokens(SECRET, VICTIM, cache_salt="alice")
        for fields in ({}, {"cache_salt": "bob"}, {"cache_salt": "alice "}, {"cache_salt": ""}):
            assert await recovered(cached_tokens, VICTIM, **fields) == "????"
        assert await cached_tokens(SECRET, ATTACKER, cache_salt="alice") == 0
        assert await cached_tokens(SECRET, VICTIM, cache_salt="alice") == 64


async def test_a_cache_salt_separates_users_of_a_server_without_keys(autojump_clock):
    async with serving() as (cached_tokens, _):
        await cached_tokens(SECRET, cache_salt="alice")
        assert await recovered(cached_tokens) == "????"
        assert await recovered(cached_tokens, cache_salt="bob") == "????"
        assert await cached_tokens(SECRET, cache_salt="alice") == 64


async def test_without_keys_and_salts_all_share(autojump_clock):
    async with serving() as (cached_tokens, _):
        await cached_tokens(SECRET)
        assert await recovered(cached_tokens) == PIN


async def test_the_worker_gets_salts_and_no_keys(autojump_clock):
    """Equal for one key and one `cache_salt`, and drawn anew by every server."""
    salts = []
    for _ in range(2):
        async with serving(api_key=(VICTIM, ATTACKER)) as (cached_tokens, received):
            for key, fields in ((VICTIM, {}), (VICTIM, {}), (ATTACKER, {}), (VICTIM, {"cache_salt": "mine"})):
                await cached_tokens(SECRET, key, **fields)
            salts += [message.params.cache_salt for message in received if isinstance(message, AddMessage)]
            assert not any(word in repr(received) for word in (VICTIM, ATTACKER, "mine"))
    assert [salts.index(salt) for salt in salts] == [0, 0, 2, 3, 4, 4, 6, 7]
