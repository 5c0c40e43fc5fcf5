"""Conversations that outgrow the context, over Realtime and in the client: `truncation`, and `overflow`."""

import pytest
from helpers.realtime_texts import assistant, reference, text_of, user

from trioengine import RequestRejected, SamplingParams

GREEDY = {"temperature": 0, "max_output_tokens": 20}
PARAMS = SamplingParams(temperature=0, max_tokens=20)
CONTEXT = 512


def question(number):
    return f"question {number}, which is rather long, so that only a few of its kind fit in the context"


def shortened(clients, leading, turns, room=20, *, at_least_newest=False):
    """The turns without the fewest oldest ones, and their number."""
    for count in range(len(turns)):
        messages = [*leading, *(message for turn in turns[count:] for message in turn)]
        if len(clients.engine.tokenizer.apply_chat_template(messages)) <= CONTEXT - room:
            return messages, count
    if at_least_newest:
        return messages, count
    raise AssertionError("even the newest message does not fit")


async def talk(client, clients, instructions="", **options):
    """Ask until turns were dropped twice; each response names the items of the dropped turns."""
    leading = [{"role": "system", "content": instructions}] if instructions else []
    turns, ids, num_shortened = [], [], 0
    for number in range(20):
        messages, count = shortened(clients, leading, [*turns, [user(question(number))]])
        response = await client.ask(question(number), **options, **GREEDY)
        assert text_of(response) == reference(clients, messages, 20)
        assert response["dropped_turns"] == count
        assert response["dropped_item_ids"] == [id for turn in ids[:count] for id in turn]
        added = [event["item"]["id"] for event in client.events if event["type"] == "conversation.item.added"]
        turns.append([user(question(number)), assistant(text_of(response))])
        ids.append(added[-2:])
        num_shortened += count > 0
        if num_shortened == 2:
            return ids
    raise AssertionError("nothing was dropped")


@pytest.mark.parametrize("instructions", ["", "be brief"])
async def test_by_default_the_oldest_turns_are_dropped(autojump_clock, clients, instructions):
    """As the protocol has it; the items stay in the conversation."""
    async with clients.realtime() as client:
        assert client.events[0]["session"]["truncation"] == "auto"
        await client.send("session.update", session={"type": "realtime", "instructions": instructions})
        for item_id, *_ in await talk(client, clients, instructions):
            await client.send("conversation.item.retrieve", item_id=item_id)
            assert (await client.until("conversation.item.retrieved"))["item"]["id"] == item_id


async def test_a_response_may_differ_from_its_session(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.send("session.update", session={"type": "realtime", "truncation": "disabled"})
        assert (await client.until("session.updated"))["session"]["truncation"] == "disabled"
        await talk(client, clients, truncation="auto")
        failed = await client.respond(**GREEDY)
        assert failed["status_details"]["error"]["code"] == "context_length_exceeded"
        assert (failed["dropped_turns"], failed["dropped_item_ids"]) == (0, [])
        beside = await client.respond(conversation="none", truncation="auto", **GREEDY)
        assert beside["dropped_turns"] > 0
        await client.send("session.update", session={"type": "realtime", "truncation": None})
        assert (await client.until("session.updated"))["session"]["truncation"] == "auto"
        assert (await client.respond(**GREEDY))["dropped_turns"] > 0


async def test_the_newest_item_is_not_dropped(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.ask("hello", **GREEDY)
        await client.say("x" * 9999)
        failed = await client.respond(**GREEDY)
        assert failed["status_details"]["error"]["code"] == "context_length_exceeded"


def retention(ratio, **fields):
    return {"type": "retention_ratio", "retention_ratio": ratio, **fields}


@pytest.mark.parametrize("instructions", ["", "be brief"])
@pytest.mark.parametrize(("ratio", "most_cuts"), [(0, 4), (0.5, 6), (0.8, 9), (1.0, 16)])
async def test_a_retention_ratio(autojump_clock, clients, ratio, most_cuts, instructions):
    """A cut goes down to the ratio, and lasts: the turns after it have their prompts in the prefix cache."""
    leading = [{"role": "system", "content": instructions}] if instructions else []
    turns, cut, num_cuts = [], 0, 0
    async with clients.realtime() as client:
        settings = {"type": "realtime", "instructions": instructions, "truncation": retention(ratio)}
        await client.send("session.update", session=settings)
        assert (await client.until("session.updated"))["session"]["truncation"] == retention(ratio)
        for number in range(20):
            everything = [*turns, [user(question(number))]]
            messages, more = shortened(clients, leading, everything[cut:])
            if more:
                room = CONTEXT - int(ratio * (CONTEXT - 20))
                messages, more = shortened(clients, leading, everything[cut:], room, at_least_newest=True)
                num_cuts += 1
            cut += more
            response = await client.ask(question(number), **GREEDY)
            assert text_of(response) == reference(clients, messages, 20)
            assert response["dropped_turns"] == cut
            assert len(response["dropped_item_ids"]) == sum(map(len, turns[:cut]))
            cached = response["usage"]["input_token_details"]["cached_tokens"]
            assert (cached > CONTEXT // 5) == (number > 0 and not more)
            said = text_of(response)
            turns.append([user(question(number)), *([assistant(said)] if said else [])])  # as a prompt has them
    assert 2 <= num_cuts <= most_cuts


async def test_a_cut_lasts_as_long_as_the_setting(autojump_clock, clients):
    """And a deleted item is no longer left out."""
    async with clients.realtime() as client:
        await client.send("session.update", session={"type": "realtime", "truncation": retention(0.5)})
        while not (response := await client.ask(question(1), **GREEDY))["dropped_turns"]:
            pass
        dropped = response["dropped_item_ids"]
        again = await client.respond(input=[{"type": "item_reference", "id": dropped[0]}], **GREEDY)
        assert (again["dropped_turns"], again["status"]) == (0, "incomplete")
        beside = await client.respond(conversation="none", **GREEDY)
        assert beside["dropped_item_ids"] == dropped
        assert len((await client.respond(truncation="auto", **GREEDY))["dropped_item_ids"]) < len(dropped)
        await client.send("conversation.item.delete", item_id=dropped[0])
        assert (await client.respond(**GREEDY))["dropped_item_ids"] == dropped[1:]


BAD_RATIOS = [
    (retention(1.1), "invalid_value", ".retention_ratio", "must be a number from 0 to 1, got 1.1"),
    (retention("1"), "invalid_type", ".retention_ratio", 'must be a number from 0 to 1, got "1"'),
    (retention(True), "invalid_type", ".retention_ratio", "must be a number from 0 to 1, got true"),
    ({"type": "retention_ratio"}, "missing_parameter", ".retention_ratio", "is missing"),
    ({"retention_ratio": 0.5}, "missing_parameter", ".type", "is missing"),
    ({"type": "x", "retention_ratio": 1}, "invalid_value", ".type", 'must be "retention_ratio", got "x"'),
    (
        retention(0.5, token_limits={"post_instructions": 100}),
        "unsupported_parameter",
        ".token_limits",
        'is not supported, got {"post_instructions": 100}',
    ),
]


@pytest.mark.parametrize(("truncation", "code", "param", "rule"), BAD_RATIOS, ids=range(len(BAD_RATIOS)))
async def test_a_retention_ratio_that_is_refused(autojump_clock, clients, truncation, code, param, rule):
    async with clients.realtime() as client:
        await client.send("session.update", session={"type": "realtime", "truncation": truncation})
        error, param = (await client.until("error"))["error"], f"session.truncation{param}"
        assert (error["code"], error["param"], error["message"]) == (code, param, f"{param} {rule}")


@pytest.mark.parametrize(
    ("truncation", "code"), [("middle", "invalid_value"), (1, "invalid_type"), ([], "invalid_type")]
)
async def test_other_truncations_are_refused_by_name(autojump_clock, clients, truncation, code):
    async with clients.realtime() as client:
        await client.say("hello")
        await client.send("session.update", session={"type": "realtime", "truncation": truncation})
        await client.send("response.create", response={"truncation": truncation})
        for where in ("session", "response"):
            error = (await client.until("error"))["error"]
            assert (error["code"], error["param"]) == (code, f"{where}.truncation")
            rule = 'must be "auto" or "disabled" or an object, got '
            assert error["message"].startswith(f"{where}.truncation {rule}")


async def ask(session, prompt, **options):
    async with session.generate(prompt, PARAMS, **options) as generation:
        return await generation.result()


async def test_the_client_refuses_by_default(autojump_clock, remote):
    async with remote.open_session() as session:
        with pytest.raises(RequestRejected) as refused:
            for number in range(20):
                assert (await ask(session, question(number))).dropped_turns == 0
        assert refused.value.code == "context_length_exceeded"
        assert len(session.history) == 2 * number > 4
    with pytest.raises(RequestRejected, match="overflow must be"):
        remote.open_session(overflow="drop")


async def test_the_client_drops_turns_as_the_engine_does(autojump_clock, remote, clients):
    """From its history, and from the server's conversation."""
    system = {"role": "system", "content": "be kind"}
    total = 0
    async with (
        remote.open_session(overflow="drop_oldest_turns", history=[system]) as session,
        clients.engine.open_session(overflow="drop_oldest_turns", history=[system]) as twin,
    ):
        for number in range(12):
            completion, expected = await ask(session, question(number)), await ask(twin, question(number))
            assert (completion.text, completion.dropped_turns) == (expected.text, expected.dropped_turns)
            assert completion.usage.prompt_tokens == expected.usage.prompt_tokens
            assert session.history == twin.history
            total += completion.dropped_turns
        assert total > 4


async def test_what_the_client_takes_back_drops_nothing(autojump_clock, remote):
    async with remote.open_session(overflow="drop_oldest_turns") as session:
        for number in range(5):
            await ask(session, question(number))
        before = session.history
        async with session.generate(question(5), PARAMS) as generation:
            await anext(generation)
        assert session.history == before
        assert (await ask(session, question(5))).dropped_turns > 0
        async with session.generate(question(6), PARAMS, keep_partial=True) as generation:
            await anext(generation)
        assert generation.completion.dropped_turns > 0
        assert session.history[-2:] == [user(question(6)), assistant(generation.completion.text)]
        assert len(session.history) < len(before) + 4
