"""Errors name the places in a prompt by the arguments that the caller gave."""

import pytest

from trioengine.core.arguments import PromptPlaces, check_content, kind_of
from trioengine.core.errors import RequestRejected

TEXT = {"role": "user", "content": "Hello!"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Hello!"}]}
PLACES = PromptPlaces.of("Hello!", [b""])


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


def test_errors_within_have_these_names_and_keep_their_cause():
    cause = OSError("no such file")
    with pytest.raises(RequestRejected, match=r"media\[0\]: it cannot be read") as caught, PLACES.naming():
        raise RequestRejected("invalid_value", "prompt[0].content[0]: it cannot be read") from cause
    assert caught.value.__cause__ is cause
    with PLACES.naming():
        pass


def test_a_message_needs_a_content():
    check_content("prompt[0]", TEXT)
    with pytest.raises(RequestRejected, match=r"prompt\[0\]\.content is missing: the message has \['role'\]"):
        check_content("prompt[0]", {"role": "user"})


@pytest.mark.parametrize(("prompt", "kind"), [(5, "int"), (TEXT, "dict; put a message into a list")])
def test_the_kind_of_what_is_no_prompt(prompt, kind):
    assert kind_of(prompt) == kind


def test_what_the_message_quotes_is_left_alone():
    error = RequestRejected("invalid_value", "max_tokens: prompt[0].content", param=None)
    assert PromptPlaces.of("Hello!", []).rejection(error).message == error.message
