"""What is not a prompt is refused where the request is entered, by a message that names what it is."""

import pytest
from helpers.expectations import GREEDY, everything_is_given_back
from helpers.pictures import PICTURE

from trioengine import RequestRejected
from trioengine.testing import simulated_engine
from trioengine.testing.simulation import IMAGE_LIMITS

NOT_PROMPTS = [
    (None, "NoneType"),
    (5, "int"),
    (0, "int"),
    (True, "bool"),
    (1.5, "float"),
    (b"hello", "bytes"),
    (bytearray(b"hello"), "bytearray"),
    ({"role": "user", "content": "hello"}, "dict; put a message into a list"),
    ({}, "dict"),
    ({1, 2}, "set"),
    (iter("ab"), "str"),
    (object(), "object"),
]
NOT_MESSAGES = [[None], [1.5], [[]], ["hello"], [{"role": "user", "content": "x"}, None], [1, "x"], [1, None], [True]]


@pytest.mark.parametrize(("prompt", "kind"), NOT_PROMPTS, ids=lambda value: repr(value)[:20])
async def test_what_is_no_prompt(autojump_clock, simulated, prompt, kind):
    """Not before: making the generation raises nothing. The session lives, and a slot is given back."""
    engine, _ = simulated
    async with engine.open_session() as session:
        generation = session.generate(prompt, GREEDY)
        with pytest.raises(
            RequestRejected, match=f"prompt must be a string, messages or token ids, got .*{kind}"
        ) as caught:
            await generation.__aenter__()
        assert (caught.value.code, caught.value.param) == ("invalid_value", "prompt")
        async with session.generate("hello", GREEDY) as generation:
            await generation.result()
    with pytest.raises(RequestRejected, match="prompt must be"):
        await engine.generate(prompt)
    assert (engine.statistics().failed, engine.statistics().finished) == (2, 1)


@pytest.mark.parametrize(
    ("prompt", "place"), [("\ud800", "prompt"), ([{"role": "user", "content": "\ud800"}], "prompt[0].content")]
)
async def test_a_fault_is_named_by_the_arguments_of_the_call(autojump_clock, simulated, prompt, place):
    with pytest.raises(RequestRejected, match=r"^prompt.* is not valid Unicode") as caught:
        await simulated[0].generate(prompt)
    assert caught.value.param == place


CONTENTS = [
    ({"role": "user", "contnt": "hi"}, r"is missing: the message has \['role', 'contnt'\]"),
    ({"role": "user", "content": 5}, "must be a string or a list of parts, got 5"),
    ({"role": "user", "content": None}, "must be a string or a list of parts, got None"),
]


@pytest.mark.parametrize("media", [[], [PICTURE]], ids=["text", "image"])
@pytest.mark.parametrize(("message", "why"), CONTENTS, ids=["missing", "a number", "None"])
async def test_a_bad_content(autojump_clock, message, why, media):
    async with simulated_engine(limits=IMAGE_LIMITS) as (engine, simulation):
        with pytest.raises(RequestRejected, match=r"prompt\[0\]\.content " + why) as caught:
            await engine.generate([message], media=media)
        assert caught.value.param == "prompt[0].content"
        await everything_is_given_back(engine, simulation)


@pytest.mark.parametrize("content", ["", " \n", []])
async def test_a_message_may_be_empty(autojump_clock, simulated, content):
    """As with other servers; a prompt may not."""
    engine, _ = simulated
    assert (await engine.generate([{"role": "user", "content": content}], GREEDY)).usage.prompt_tokens


@pytest.mark.parametrize("prompt", ["", [], ()])
async def test_an_empty_prompt(autojump_clock, simulated, prompt):
    engine, _ = simulated
    with pytest.raises(RequestRejected, match="prompt is empty") as caught:
        await engine.generate(prompt)
    assert (caught.value.code, caught.value.param) == ("empty_prompt", "prompt")


@pytest.mark.parametrize("prompt", NOT_MESSAGES, ids=repr)
async def test_what_is_neither_messages_nor_token_ids(autojump_clock, prompt):
    async with simulated_engine(thread_threshold=0) as (engine, simulation):
        with pytest.raises(RequestRejected) as caught:
            await engine.generate(prompt)
        assert caught.value.code == "invalid_value"
        await everything_is_given_back(engine, simulation)
