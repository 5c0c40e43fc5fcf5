"""Conversations that outgrow the context, over Realtime and in the client: `truncation`, and `overflow`."""

import pytest
from realtime_texts import assistant, reference, text_of, user

from trioengine import RequestRejected, SamplingParams

GREEDY = {"temperature": 0, "max_output_tokens": 20}
PARAMS = SamplingParams(temperature=0, max_tokens=20)
CONTEXT = 512


def question(number):
    return f"question {number}, which is rather long, so that only a few of its kind fit in the context"


def shortened(clients, leading, turns, room=20):
    """The turns without the fewest oldest ones, and their number."""
    for count in range(len(turns)):
        messages = [*leading, *(message for turn in turns[count:] for message in turn)]
        if len(clients.engine.tokenizer.apply_chat_template(messages)) <= CONTEXT - room:
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


RATIO = {"type": "retention_ratio", "retention_ratio": 0.8}


@pytest.mark.parametrize("truncation", [RATIO, "middle", 1, True, []])
async def test_other_truncations_are_refused_by_name(autojump_clock, clients, truncation):
    async with clients.realtime() as client:
        await client.say("hello")
        await client.send("session.update", session={"type": "realtime", "truncation": truncation})
        await client.send("response.create", response={"truncation": truncation})
        for where in ("session", "response"):
            error = (await client.until("error"))["error"]
            assert (error["code"], error["param"]) == ("unsupported_parameter", f"{where}.truncation")
            assert error["message"].startswith(f"{where}.truncation must be 'auto' or 'disabled', got ")


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
