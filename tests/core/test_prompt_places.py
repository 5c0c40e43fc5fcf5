"""Errors name the places in a prompt by the arguments that the caller gave."""

import pytest

from trioengine.core.errors import RequestRejected
from trioengine.core.prompt_places import PromptPlaces

TEXT = {"role": "user", "content": "Hello!"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Hello!"}]}


@pytest.mark.parametrize(
    ("prompt", "media", "place", "expected"),
    [
        ("Hello!", [], "prompt[0].content", "prompt"),
        ("Hello!", [b"", b""], "prompt[0].content[1]", "media[1]"),
        ("Hello!", [b""], "prompt[0].content[0].image_url", "media[0]"),
        ("Hello!", [b""], "prompt[0].content[1].text", "prompt"),
        ([TEXT, TEXT], [b""], "prompt[1].content[1].text", "prompt[1].content"),
        ([TEXT, TEXT], [b""], "prompt[0].content", "prompt[0].content"),
        ([PARTS], [b""], "prompt[0].content[1].text", "prompt[0].content[0].text"),
        ([PARTS, TEXT], [b""], "prompt[0].content[0].text", "prompt[0].content[0].text"),
        ([TEXT], [], "prompt[0].role", "prompt[0].role"),
        ([TEXT], [], "history[0].content", "history[0].content"),
        ([TEXT], [], "messages", "prompt"),
        ([3], 5, "prompt[0]", "prompt[0]"),
        ([], [], "prompt", "prompt"),
        (5, None, "prompt", "prompt"),
    ],
)
def test_places(prompt, media, place, expected):
    places = PromptPlaces.of(prompt, media)
    assert places.name(place) == expected
    renamed = places.rejection(RequestRejected("invalid_value", f"{place}: it is bad", param=place))
    assert (renamed.code, renamed.message, renamed.param) == ("invalid_value", f"{expected}: it is bad", expected)


def test_what_the_message_quotes_is_left_alone():
    error = RequestRejected("invalid_value", "max_tokens: prompt[0].content", param=None)
    assert PromptPlaces.of("Hello!", []).rejection(error).message == error.message
