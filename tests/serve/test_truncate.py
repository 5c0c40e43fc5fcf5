"""The client cuts an assistant's item: later prompts lack the text that it never saw."""

import pytest
from helpers.realtime_texts import GREEDY, LONG, assistant, reference, text_of, user


async def test_what_was_cut_is_not_in_the_conversation(autojump_clock, clients):
    async with clients.realtime() as client:
        first = await client.ask("hello", temperature=0, max_output_tokens=20, ignore_eos=True)
        (item,) = first["output"]
        kept = text_of(first)[:4]
        place = {"item_id": item["id"], "content_index": 0}
        await client.send("conversation.item.truncate", **place, text_end=4)
        truncated = await client.until("conversation.item.truncated")
        assert {name: truncated[name] for name in (*place, "text_end", "audio_end_ms")} == {
            **place,
            "text_end": 4,
            "audio_end_ms": 0,
        }
        await client.send("conversation.item.retrieve", item_id=item["id"])
        retrieved = (await client.until("conversation.item.retrieved"))["item"]
        assert (retrieved["status"], retrieved["content"][0]["text"]) == ("incomplete", kept)
        second = await client.ask("more", **GREEDY)
        assert text_of(second) == reference(clients, [user("hello"), assistant(kept), user("more")])


async def test_an_item_that_is_cut_to_nothing_is_left_out(autojump_clock, clients):
    async with clients.realtime() as client:
        first = await client.ask("hello", **GREEDY)
        place = {"item_id": first["output"][0]["id"], "content_index": 0}
        await client.send("conversation.item.truncate", **place, text_end=0)
        await client.until("conversation.item.truncated")
        second = await client.respond(**GREEDY)
        assert text_of(second) == text_of(first)


async def test_parts_behind_the_cut_go_with_it(autojump_clock, clients):
    async with clients.realtime() as client:
        parts = [{"type": "output_text", "text": text} for text in ("one", "two", "three")]
        item = {"type": "message", "role": "assistant", "id": "said", "content": parts}
        await client.send("conversation.item.create", item=item)
        await client.send("conversation.item.truncate", item_id="said", content_index=1, text_end=2)
        await client.send("conversation.item.retrieve", item_id="said")
        retrieved = (await client.until("conversation.item.retrieved"))["item"]
        assert [part["text"] for part in retrieved["content"]] == ["one", "tw"]


async def test_characters_are_code_points(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("a😀b", role="assistant", id="said")
        await client.send("conversation.item.truncate", item_id="said", content_index=0, text_end=2)
        await client.send("conversation.item.retrieve", item_id="said")
        assert (await client.until("conversation.item.retrieved"))["item"]["content"][0]["text"] == "a😀"


REFUSED = [
    ({"item_id": "user", "content_index": 0, "text_end": 1}, "invalid_value", "item_id"),
    ({"item_id": "said", "content_index": 1, "text_end": 1}, "invalid_value", "content_index"),
    ({"item_id": "said", "content_index": -1, "text_end": 1}, "invalid_value", "content_index"),
    ({"item_id": "said", "content_index": False, "text_end": 1}, "invalid_type", "content_index"),
    ({"item_id": "said", "content_index": 0, "text_end": 7}, "invalid_value", "text_end"),
    ({"item_id": "said", "content_index": 0, "text_end": "1"}, "invalid_type", "text_end"),
]


@pytest.mark.parametrize(("fields", "code", "param"), REFUSED)
async def test_a_cut_that_cannot_be_made_changes_nothing(autojump_clock, clients, fields, code, param):
    async with clients.realtime() as client:
        await client.say("hello", id="user")
        await client.say("answer", role="assistant", id="said")
        await client.send("conversation.item.truncate", **fields)
        error = (await client.until("error"))["error"]
        assert (error["code"], error["param"]) == (code, param)
        assert param in error["message"]
        response = await client.ask("more", **GREEDY)
        assert text_of(response) == reference(clients, [user("hello"), assistant("answer"), user("more")])


async def test_an_item_that_is_generated_is_not_cut(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("hello")
        await client.send("response.create", response=LONG)
        item = (await client.until("response.output_item.added"))["item"]
        await client.send("conversation.item.truncate", item_id=item["id"], content_index=0, text_end=0)
        assert (await client.until("error"))["error"]["code"] == "item_in_progress"
        response = (await client.until("response.done"))["response"]
        assert text_of(response) == reference(clients, [user("hello")], 200, ignore_eos=True)
