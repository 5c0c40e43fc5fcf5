"""Several choices of one prompt (`n`), on both routes: whole and streamed, one prefill, one admission, one end."""

from functools import partial

import pytest
import trio
from helpers.clients import CHAT, chat, events_of, first_token, open_clients
from helpers.expectations import until
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineConfig, TransitionFailed

COMPLETIONS = "/v1/completions"
LONG = "to be or not to be, that is the question " * 5  # many blocks of the KV cache
TOOL = {"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}}


def body(path, **fields):
    fields = {"temperature": 1, "seed": 7, **fields}
    if path == CHAT:
        return chat(LONG, **fields)
    return {"prompt": LONG, "max_tokens": 5, "ignore_eos": True, **fields}


def text_of(choice):
    return choice["text"] if "text" in choice else choice["message"]["content"]


def streamed(events):
    """The texts and the finish reasons by index."""
    texts, reasons = {}, {}
    for choice in (choice for event in events for choice in event["choices"]):
        index = choice["index"]
        texts[index] = texts.get(index, "") + (
            choice["text"] if "text" in choice else choice["delta"].get("content", "")
        )
        if choice["finish_reason"] is not None:
            assert index not in reasons
            reasons[index] = choice["finish_reason"]
    return texts, reasons


both_routes = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


@both_routes
async def test_choice_i_has_the_seed_plus_i(autojump_clock, clients, path):
    answer = (await clients.request("POST", path, body(path, n=4))).json
    alone = [(await clients.request("POST", path, body(path, seed=7 + number))).json for number in range(4)]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert list(map(text_of, answer["choices"])) == [text_of(each["choices"][0]) for each in alone]
    assert answer["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 20
    fields = body(path, n=4, stream=True, stream_options={"include_usage": True})
    *events, usage, done = (await clients.request("POST", path, fields)).events
    texts, reasons = streamed(events)
    assert texts == dict(enumerate(map(text_of, answer["choices"])))
    assert (reasons, done) == (dict.fromkeys(range(4), "length"), "[DONE]")
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 20)
    assert usage["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), None])
async def test_the_ends_of_the_seeds(autojump_clock, clients, seed):
    assert (await clients.chat(n=2, seed=seed)).status == 200


@both_routes
@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_is_computed_once(autojump_clock, clients, path, stream):
    """By the worker's own counts: each further choice computes less than a block of the prompt."""
    answer = await clients.request("POST", path, body(path, n=16, max_tokens=1, stream=stream))
    assert answer.status == 200
    statistics = clients.engine.statistics()
    prompt = statistics.prompt_tokens // 16
    assert statistics.prefix_cache_queries == 16 * prompt > 16 * 100
    computed = statistics.prefix_cache_queries - statistics.prefix_cache_hits
    assert computed < prompt + 15 * clients.engine.config.block_size


async def test_prompts_times_choices(autojump_clock, clients):
    fields = {"prompt": ["to be", "or not"], "n": 3, "temperature": 1, "seed": 3, "max_tokens": 4, "ignore_eos": True}
    answer = (await clients.request("POST", COMPLETIONS, fields)).json
    expected = []
    for prompt in fields["prompt"]:
        for seed in (3, 4, 5):
            alone = await clients.request("POST", COMPLETIONS, {**fields, "prompt": prompt, "n": 1, "seed": seed})
            expected.append(alone.json["choices"][0]["text"])
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert list(map(text_of, answer["choices"])) == expected
    assert answer["usage"]["prompt_tokens"] == len("to be") + len("or not")
    assert answer["usage"]["completion_tokens"] == 24
    *events, done = (await clients.request("POST", COMPLETIONS, {**fields, "stream": True})).events
    assert (streamed(events)[0], done) == (dict(enumerate(expected)), "[DONE]")


async def test_many_prompts_and_few_slots(autojump_clock):
    """Choices of later prompts wait for slots, and hold none that their first one needs."""
    async with open_clients(EngineConfig(model="toy", max_num_seqs=2, max_num_queued_reqs=0)) as clients:
        fields = {"prompt": list("abcdefgh"), "n": 2, "max_tokens": 4, "temperature": 0}
        for stream in (False, True):
            answer = await clients.request("POST", COMPLETIONS, {**fields, "stream": stream})
            assert answer.status == 200
        assert set(streamed(answer.events[:-1])[1]) == set(range(16))


async def test_tools_and_grammars(autojump_clock, clients):
    answer = (await clients.chat(n=3, tools=[TOOL], tool_choice="required", max_tokens=200)).json
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["tool_calls"] * 3
    fields = {"n": 3, "tools": [TOOL], "tool_choice": "required", "max_tokens": 200, "stream": True}
    *events, _ = (await clients.chat(**fields)).events
    calls = [
        (choice["index"], call["function"]["name"])
        for event in events
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls", ())
        if "id" in call
    ]
    assert sorted(calls) == [(0, "go"), (1, "go"), (2, "go")]
    for path in (CHAT, COMPLETIONS):
        fields = body(path, n=3, structured_outputs={"choice": ["yes", "no"]})
        choices = (await clients.request("POST", path, fields)).json["choices"]
        assert {text_of(choice) for choice in choices} <= {"yes", "no"}


async def test_logprobs_of_each_choice(autojump_clock, clients):
    choices = (await clients.chat(n=2, logprobs=True, top_logprobs=1)).json["choices"]
    assert [len(choice["logprobs"]["content"]) for choice in choices] == [5, 5]


@both_routes
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_all(autojump_clock, clients, path, stream):
    async with clients.connect() as client:
        await client.send("POST", path, body(path, n=3, max_tokens=200, stream=stream))
        await first_token(clients.engine)
        await trio.aclose_forcefully(client.stream)
    await clients.everything_is_given_back()
    assert clients.engine.statistics().aborted == 3


@both_routes
async def test_an_abort_by_id_ends_all(autojump_clock, clients, path):
    async with clients.connect() as client:
        await client.send("POST", path, body(path, n=3, max_tokens=200, request_id="mine"))
        await first_token(clients.engine)
        assert (await clients.request("POST", "/abort_request", {"request_id": "mine"})).json == {"aborted": 3}
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (500, "aborted")
    await clients.everything_is_given_back()


@both_routes
@pytest.mark.parametrize("number", [0, 1, 2])
async def test_one_that_fails_ends_all(autojump_clock, clients, path, number):
    async with clients.connect() as client:
        await client.send("POST", path, body(path, n=3, max_tokens=200, stream=True))
        await client.head()
        for _ in range(10):
            await client.piece()
        ids = sorted(each.id for session in clients.engine.runtime.sessions.all for each in session.requests)
        assert clients.engine.abort(ids[number])
        *_, error, done = events_of(await client.rest())
        assert (error["error"]["code"], done) == ("aborted", "[DONE]")
    await clients.everything_is_given_back()


@both_routes
async def test_a_refused_prompt_is_one_error(autojump_clock, clients, path):
    fields = body(path, n=3)
    fields |= {"messages": [{"role": "user", "content": "x" * 600}]} if path == CHAT else {"prompt": "x" * 600}
    answer = await clients.request("POST", path, fields)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    await clients.everything_is_given_back()


@both_routes
async def test_all_or_none_are_admitted(autojump_clock, path):
    async with open_clients(EngineConfig(model="toy", max_num_seqs=2, max_num_queued_reqs=2)) as clients:
        async with clients.connect() as client:
            await client.send("POST", path, body(path, n=3, max_tokens=200))
            await first_token(clients.engine)
            before = clients.engine.statistics()
            answer = await clients.request("POST", path, body(path, n=2))
            assert (answer.status, answer.error["code"]) == (429, "overloaded")
            assert answer.error["message"].startswith("n: 2 choices need 2 request slots; of 4, 1 are free")
            after = clients.engine.statistics()
            assert (after.received, after.rejected) == (before.received, before.rejected + 1)
            assert (await clients.request("POST", path, body(path, n=1))).status == 200
            assert len((await client.answer()).json["choices"]) == 3


NEVER = [
    (
        {"max_num_seqs": 2, "max_num_queued_reqs": 2},
        "n must be at most 4 (max_num_seqs 2 + max_num_queued_reqs 2), got 5",
    ),
    ({"max_num_seqs": 8, "max_sessions": 4}, "n must be at most 4 (max_sessions), got 5"),
]


@both_routes
@pytest.mark.parametrize(("options", "message"), NEVER)
async def test_more_choices_than_the_server_ever_has_slots_for(autojump_clock, path, options, message):
    async with open_clients(EngineConfig(model="toy", **options)) as clients:
        answer = await clients.request("POST", path, body(path, n=5))
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_value", "n")
        assert answer.error["message"] == message
        assert clients.engine.statistics().rejected == 1
        assert (await clients.request("POST", path, body(path, n=4))).status == 200


async def test_two_requests_that_do_not_both_fit(autojump_clock):
    """One of them gets all its choices, and the other none, whatever the order of their tasks."""
    for _ in range(10):
        async with open_clients(EngineConfig(model="toy", max_num_seqs=2, max_num_queued_reqs=2)) as clients:
            answers = []

            async def ask(clients=clients, answers=answers):
                answers.append(await clients.chat(LONG, n=3, max_tokens=200))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                nursery.start_soon(ask)
            assert sorted(answer.status for answer in answers) == [200, 429]
            statistics = clients.engine.statistics()
            assert (statistics.received, statistics.finished, statistics.rejected) == (3, 3, 1)


async def test_sessions_count_too(autojump_clock):
    async with open_clients(EngineConfig(model="toy", max_sessions=2)) as clients:
        async with clients.engine.open_session():
            answer = await clients.chat(n=2)
            assert (answer.status, answer.error["code"]) == (429, "overloaded")
            assert answer.error["message"] == "n: 2 choices need 2 sessions; of 2, 1 are free (max_sessions)"
        assert (await clients.chat(n=2)).status == 200


@pytest.mark.parametrize("n", [1, 2])
async def test_choices_go_on_after_two_deaths_before_the_first_token(autojump_clock, n):
    async with open_clients(EngineConfig(model="toy")) as clients, clients.connect() as client:
        await client.send("POST", CHAT, chat("to be or not " * 20, n=n, max_tokens=20))
        for _ in range(2):
            await until(clients.engine, iter([False, True]).__next__)  # one step, of several for the prompt
            clients.simulation.worker.kill()
        answer = await client.answer()
    assert answer.status == 200 and len(answer.json["choices"]) == n


SMALL_STEPS = EngineConfig(model="toy", max_num_seqs=8, max_num_batched_tokens=32)  # several for a prompt


async def asked_before_the_first_token(clients, client, path=CHAT):
    """Ask for three choices; return when the worker has computed a part of the prompt."""
    await client.send("POST", path, body(path, n=3, max_tokens=20))
    await until(clients.engine, iter([False, True]).__next__)
    assert clients.engine.statistics().preparing == 2


@pytest.mark.parametrize("change", ["sleep", "update"])
@both_routes
async def test_choices_are_kept_through_a_change_before_the_first_token(autojump_clock, path, change):
    async with open_clients(SMALL_STEPS) as clients:
        async with clients.connect() as client:
            await asked_before_the_first_token(clients, client, path)
            if change == "sleep":
                await clients.engine.sleep(mode="keep")
                await trio.sleep(60)
                await clients.engine.wake()
            else:
                await clients.engine.update_weights("toy", mode="keep")
            answer = await client.answer()
        assert answer.status == 200
        undisturbed = await clients.request("POST", path, body(path, n=3, max_tokens=20))
        assert [*map(text_of, answer.json["choices"])] == [*map(text_of, undisturbed.json["choices"])]
        await clients.everything_is_given_back()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("timeout", [None, 0])
async def test_a_sleep_waits_for_choices_before_the_first_token(autojump_clock, timeout, level):
    async with open_clients(SMALL_STEPS) as clients, clients.connect() as client:
        await asked_before_the_first_token(clients, client)
        await clients.engine.sleep(level, mode="wait", timeout=timeout)
        answer = await client.answer()
        assert (answer.status, clients.engine.power.level) == (200 if timeout is None else 503, level)
        await clients.everything_is_given_back()


async def test_a_sleep_that_aborts_ends_choices_before_the_first_token(autojump_clock):
    async with open_clients(SMALL_STEPS) as clients, clients.connect() as client:
        await asked_before_the_first_token(clients, client)
        await clients.engine.sleep(mode="abort")
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (503, "sleep")
        assert clients.engine.statistics().aborted == 3


@pytest.mark.parametrize("end", ["drain", "sleep"])
async def test_choices_that_are_suspended_are_ended(autojump_clock, end):
    async with open_clients(SMALL_STEPS) as clients, clients.connect() as client:
        await asked_before_the_first_token(clients, client)
        await clients.engine.sleep(mode="keep")
        if end == "drain":
            assert not await clients.engine.drain()
        else:
            await clients.engine.sleep(mode="abort")
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (503, "shutdown" if end == "drain" else "sleep")
        assert clients.engine.statistics().suspended == clients.engine.statistics().preparing == 0


@pytest.mark.parametrize("n", [1, 3])
async def test_a_drain_lets_choices_finish_for_which_a_sleep_waits(autojump_clock, n):
    async with open_clients(SMALL_STEPS) as clients, clients.connect() as client, trio.open_nursery() as nursery:
        await client.send("POST", CHAT, chat(LONG, n=n, max_tokens=20))
        await until(clients.engine, iter([False, True]).__next__)
        sleep = partial(clients.engine.sleep, mode="wait")
        nursery.start_soon(fails, TransitionFailed, sleep)
        await wait_all_tasks_blocked()
        assert await clients.engine.drain()
        assert (await client.answer()).status == 200


async def fails(error, call):
    with pytest.raises(error):
        await call()
