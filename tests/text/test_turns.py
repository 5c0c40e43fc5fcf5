"""Turns, and the turns that are dropped from a prompt that is too long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine import RequestRejected
from trioengine.core.types import token_ids
from trioengine.testing import toy_model
from trioengine.text.chat_tokenizer import ChatTokenizer
from trioengine.text.conversation import Conversation, newest_turn
from trioengine.text.messages import Turns

TOY = toy_model()
CHAT = ChatTokenizer(TOY.tokenizer, TOY.chat_template)
ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}


def chat(roles, content="x"):
    return tuple({"role": ROLES[role], "content": f"{content}{index}"} for index, role in enumerate(roles))


@pytest.mark.parametrize(
    ("roles", "starts"),
    [
        ("", ()),
        ("s", ()),
        ("u", (0,)),
        ("ua", (0,)),
        ("uau", (0, 2)),
        ("sdua", (2,)),
        ("suaua", (1, 3)),
        ("sauau", (1, 2, 4)),  # the greeting is a turn of its own
        ("uatau", (0, 4)),
        ("uusu", (0, 1, 3)),  # a later system message belongs to the turn before it
    ],
)
def test_a_turn_begins_with_a_user_message(roles, starts):
    assert Turns.of(chat(roles)).starts == starts


def test_the_leading_system_messages_and_the_newest_turn_are_not_dropped():
    messages = chat("sdauatauas")
    turns = Turns.of(messages)
    assert turns.max_dropped == 2
    assert [turns.without(count) for count in range(3)] == [
        messages,
        messages[:2] + messages[3:],
        messages[:2] + messages[7:],
    ]
    assert turns.dropped(2) == range(2, 7)
    assert turns.newest == newest_turn(messages) == messages[:2] + messages[7:]


@pytest.mark.parametrize("prompt", ["a text", [1, 2, 3]])
def test_texts_and_token_ids_are_not_shortened(prompt):
    assert newest_turn(prompt) == prompt


def conversation(turns):
    history = [message for index in range(turns) for message in chat("ua", f"turn {index}, message ")]
    return Conversation(CHAT, [{"role": "system", "content": "be brief"}, *history]), history


@pytest.mark.parametrize("limit", [1, 60, 100, 101, 150, 200, 250, 300, 400])
def test_the_fewest_turns_are_dropped(limit):
    """As many as a search one by one drops, and all but the newest where none fits."""
    talk, _ = conversation(6)
    messages = [*talk.history, {"role": "user", "content": "now?"}]
    kept = [[messages[0], *messages[1 + 2 * count :]] for count in range(7)]
    lengths = [len(CHAT.apply_chat_template(each)) for each in kept]
    count = next((count for count in range(7) if lengths[count] <= limit), 6)
    prepared = talk.prepare("now?", limit)
    assert prepared.dropped_turns == count
    assert list(prepared.messages) == kept[count]
    assert prepared.token_ids.tolist() == CHAT.apply_chat_template(kept[count])
    assert talk.history == messages[:-1]


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=8),
    limit=st.integers(1, 400),
    ratio=st.floats(0, 1) | st.just(1.0),
)
def test_over_the_limit_a_ratio_of_it_is_retained(sizes, limit, ratio):
    """No turn is dropped up to the limit, and over it the fewest, so that the rest fits the ratio."""
    *older, newest = [list(chat("u", "x" * size)) for size in sizes]
    turns = [[*turn, *chat("a")] for turn in older]
    kept = [[message for turn in turns[count:] for message in turn] + newest for count in range(len(sizes))]
    lengths = [len(CHAT.apply_chat_template(each)) for each in kept]
    fitting = (count for count, length in enumerate(lengths) if length <= int(ratio * limit))
    count = 0 if lengths[0] <= limit else next(fitting, len(older))
    prepared = Conversation(CHAT, kept[0][:-1]).prepare(newest, limit, ratio)
    assert prepared.dropped_turns == count
    assert list(prepared.messages) == kept[count]
    assert prepared.token_ids.tolist() == CHAT.apply_chat_template(kept[count])


def test_a_commit_takes_the_dropped_turns_out_of_the_history():
    talk, history = conversation(6)
    prepared = talk.prepare("now?", 150)
    assert 0 < prepared.dropped_turns < 6
    talk.commit(prepared, token_ids([*b"yes"]), "yes")
    kept = history[2 * prepared.dropped_turns :]
    turn = [{"role": "user", "content": "now?"}, {"role": "assistant", "content": "yes"}]
    assert talk.history == [{"role": "system", "content": "be brief"}, *kept, *turn]
    following = talk.prepare("and then?", 400)
    assert following.dropped_turns == 0
    assert following.token_ids[: len(prepared.token_ids)] == prepared.token_ids


def test_without_a_limit_nothing_is_dropped():
    talk, _ = conversation(50)
    assert talk.prepare("now?").dropped_turns == 0


def test_turns_that_cannot_fit_are_not_tokenized(monkeypatch):
    """A text has a token for so many characters at least: longer ones are dropped by their length."""
    lengths = []
    encode = CHAT.encode_rendering
    monkeypatch.setattr(CHAT, "encode_rendering", lambda rendering: lengths.append(len(rendering)) or encode(rendering))
    limit = 100
    large = "x" * (CHAT.tokenizer.max_token_bytes * limit + 1)
    history = [message for _ in range(20) for message in (*chat("u", large), *chat("a"))]
    talk = Conversation(CHAT, [*history, *chat("ua")])
    assert talk.prepare("now?", limit).dropped_turns == 20
    assert sum(lengths) < len(large) * 2


def test_token_ids_are_not_dropped():
    talk = Conversation(CHAT)
    talk.commit(talk.prepare([1, 2, 3], 2), token_ids([4]), "")
    prepared = talk.prepare([5], 2)
    assert (prepared.token_ids.tolist(), prepared.dropped_turns) == ([1, 2, 3, 4, 5], 0)


def test_a_bad_message_is_named_by_its_place():
    talk, _ = conversation(1)
    with pytest.raises(RequestRejected, match=r"prompt\[0\].role"):
        talk.prepare([{"role": "king", "content": "x"}], 10)
