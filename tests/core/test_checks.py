"""Checks of arguments, and the names of arguments in errors."""

import copy
import dataclasses
import inspect
import math
import pickle
import weakref

import pytest
import trio

from trioengine import EngineConfig, InvalidConfig, RequestRejected, SamplingParams, UnknownArgument
from trioengine.core.checks import (
    MAX_DEPTH,
    PromptPlaces,
    check_callback,
    check_cause,
    check_flag,
    check_history,
    check_json,
    check_label,
    check_names,
    check_request,
    check_role,
    check_seconds,
    check_wait,
    content_of,
    is_key,
    kind_of,
    names_checked,
)
from trioengine.core.types import Cause


def nested(depth):
    return [nested(depth - 1)] if depth else 1


@pytest.mark.parametrize("value", [None, "é", 1, 1.5, True, {"a": [{}, ()]}, nested(MAX_DEPTH)])
def test_a_json_value(value):
    check_json(value, "x")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("\ud800", "x is not valid Unicode: it has a lone surrogate"),
        ({"a": ["é", "\ud800"]}, "x.a[1] is not valid Unicode: it has a lone surrogate"),
        ({"\ud800": 1}, "x is not valid Unicode: it has a lone surrogate"),
        ({"a": {1: 2}}, "x.a has a key that is not a string: 1"),
        ([b"y"], "x[0] must be a JSON value, got bytes"),
        ({1}, "x must be a JSON value, got set"),
        (nested(MAX_DEPTH + 1), f"x{'[0]' * (MAX_DEPTH + 1)} is nested too deeply"),
    ],
)
def test_a_value_that_json_does_not_have(value, problem):
    with pytest.raises(RequestRejected) as refused:
        check_json(value, "x")
    assert (refused.value.code, refused.value.message) == ("invalid_value", problem)
    assert problem.startswith(f"{refused.value.param} ")


def check_x_role(message):
    check_role("x", message, ["system", "user"])


def test_a_role_that_is_known():
    check_x_role({"role": "user", "content": "y"})


@pytest.mark.parametrize(
    ("check", "values"),
    [
        (lambda value: check_flag("reload", value), [True, False]),
        (check_wait, [True, False, None]),
        (check_label, ["", "mine", None]),
        (check_seconds, [0, 2.5, math.inf]),
        (check_request, [1, "mine"]),
        (check_cause, [*Cause]),
        (check_history, [None, [], ({"role": "user"},)]),
    ],
)
def test_a_right_value_comes_back(check, values):
    assert [check(value) for value in values] == values


@pytest.mark.parametrize(
    ("check", "param", "value", "problem"),
    [
        (lambda value: check_flag("reload", value), "reload", 1, "must be True or False, got 1"),
        (check_wait, "wait", "no", "must be True, False or None, got 'no'"),
        (check_label, "label", 7, "must be a string, got 7"),
        (check_seconds, "timeout", None, "must be seconds from 0, got None"),
        (check_seconds, "timeout", math.nan, "must be seconds from 0, got nan"),
        (check_request, "request", True, "must be a request's id or its label, got True"),
        (check_request, "request", None, "must be a request's id or its label, got None"),
        (check_history, "history", "x", "must be a list of messages, got 'x'"),
        (check_history, "history", 3, "must be a list of messages, got 3"),
        (check_x_role, "x.role", {"role": []}, "must be one of system, user, got []"),
        (check_x_role, "x.role", {"rolle": "user"}, "is missing: the message has ['rolle']"),
        (check_cause, "cause", "me", f"must be one of {', '.join(Cause)}, got 'me'"),
    ],
)
def test_a_wrong_value_is_rejected(check, param, value, problem):
    with pytest.raises(RequestRejected) as refused:
        check(value)
    error = refused.value
    assert (str(error), error.param, error.code) == (f"{param} {problem}", param, "invalid_value")


def test_a_callback_can_be_called():
    check_callback("on_load", None)
    check_callback("on_load", print)
    with pytest.raises(InvalidConfig, match="on_load must be a function, got 'x'") as refused:
        check_callback("on_load", "x")
    assert refused.value.fields == ("on_load",)


def test_an_unknown_name_raises_with_the_nearest():
    check_names("sleep", ["level"], ["level", "mode"])
    with pytest.raises(UnknownArgument, match=r"^sleep\(\) has no argument 'modes'; did you mean 'mode'\?$"):
        check_names("sleep", ["level", "modes"], ["level", "mode"])
    with pytest.raises(TypeError, match=r"^sleep\(\) has no argument 'xyzzy'$"):
        check_names("sleep", ["xyzzy"], ["level", "mode"])
    with pytest.raises(TypeError, match=r"^open_session\(\) has no argument 'system'; did you mean 'history'\?$"):
        check_names("open_session", ["system"], ["label", "history"])


@pytest.mark.parametrize(
    ("make", "name", "nearest"),
    [(SamplingParams, "max_token", "max_tokens"), (EngineConfig, "max_model_length", "max_model_len")],
)
def test_a_field_that_is_not_there_names_the_nearest(make, name, nearest):
    known = rf"^{make.__name__}\(\) has no argument '{name}'; did you mean '{nearest}'\?$"
    with pytest.raises(UnknownArgument, match=known):
        make(**{name: 3})
    with pytest.raises(UnknownArgument, match=known):
        dataclasses.replace(make(), **{name: 3})
    assert nearest in inspect.signature(make).parameters
    assert copy.copy(make()) == pickle.loads(pickle.dumps(make())) == make()


def test_a_checked_function_is_the_function():
    class Bed:
        @names_checked
        def sleep(self, level: int, *, mode: str = "abort") -> tuple[int, str]:
            """Go to bed."""
            return level, mode

    assert Bed().sleep(1, mode="keep") == (1, "keep")
    assert (Bed.sleep.__doc__, list(inspect.signature(Bed.sleep).parameters)) == (
        "Go to bed.",
        ["self", "level", "mode"],
    )
    with pytest.raises(UnknownArgument, match="did you mean 'mode'"):
        Bed().sleep(1, mod="keep")


async def test_a_checked_coroutine_function_is_one():
    @names_checked
    async def sleep(level: int) -> int:
        return level

    assert inspect.iscoroutinefunction(sleep)
    assert await sleep(level=1) == 1
    with pytest.raises(UnknownArgument, match="did you mean 'level'"):
        await sleep(levl=1)


async def test_a_checked_coroutine_function_does_not_keep_its_arguments():
    class Big:
        pass

    given = []

    @names_checked
    async def use(big):
        given.append(weakref.ref(big))
        del big
        await trio.lowlevel.checkpoint()
        return given[0]()

    assert await use(Big()) is None


@pytest.mark.parametrize(
    ("value", "is_valid"),
    [("sk-Key_1~!", True), ("", False), ("a b", False), ("ä", False), ("a\n", False), (b"a", False)],
)
def test_a_key_is_visible_ascii(value, is_valid):
    assert is_key(value) is is_valid


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
    assert content_of("prompt[0]", TEXT) == TEXT["content"]
    assert content_of("prompt[0]", {"role": "assistant", "content": None, "tool_calls": [{}]}) == ""
    assert content_of("prompt[0]", {"role": "assistant", "content": None}) is None
    with pytest.raises(RequestRejected, match=r"prompt\[0\]\.content is missing: the message has \['role'\]"):
        content_of("prompt[0]", {"role": "user"})


@pytest.mark.parametrize(("prompt", "kind"), [(5, "int"), (TEXT, "dict; put a message into a list")])
def test_the_kind_of_what_is_no_prompt(prompt, kind):
    assert kind_of(prompt) == kind


def test_what_the_message_quotes_is_left_alone():
    error = RequestRejected("invalid_value", "max_tokens: prompt[0].content", param=None)
    assert PromptPlaces.of("Hello!", []).rejection(error).message == error.message
