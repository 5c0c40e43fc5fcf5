"""Values from files and users in messages: short, printable, made with little memory; suggestions of known names."""

import tracemalloc

import pytest

from trioengine.core.wording import brief, counted, did_you_mean, excerpt, printable, printable_lines

DEEP = None
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("tok", "'tok'"),
        ("x" * 78, f"'{'x' * 78}'"),
        ("x" * 79, f"'{'x' * 78}…"),
        ("\x1b[31m\u202e", r"'\x1b[31m\u202e'"),
        (b"\0", r"b'\x00'"),
        ("\ud800", r"'\ud800'"),
        ([1, "a"], "[1, 'a']"),
        (list(range(99)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, ...]"),
        (DEEP, "[[[[...]]]]"),
        (10**5000, "a value too long to show"),
        (None, "None"),
    ],
    ids=range(11),
)
def test_a_value_in_a_message(value, shown):
    assert brief(value) == shown
    assert len(shown) <= 80 and shown.isprintable()


@pytest.mark.parametrize("value", ["\0" * 10**7, [["\0" * 10**6] * 1000] * 1000], ids=["text", "lists"])
def test_a_large_value_costs_little(value):
    tracemalloc.start()
    brief(value)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_a_message_of_another_library():
    assert excerpt('unknown variant `\x1b[2J`, it\'s "x" – é') == 'unknown variant `\\x1b[2J`, it\'s "x" – é'
    assert excerpt("x" * 300) == "x" * 200
    assert excerpt("\n" * 300) == "\\n" * 99 + "\\…"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("a\x1b[31mred", r"a\x1b[31mred"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("over\rwritten\r\n", "overwritten\n"),
        ("\x00\x7f", r"\x00\x7f"),
        ("\x80\x9b31m\x9f", r"\x80\x9b31m\x9f"),
        ("\ud800", r"\ud800"),
        ("abc\u202edcb\u2066x\u2069", r"abc\u202edcb\u2066x\u2069"),
        ("\u2028", r"\u2028"),
        ("é日本😀 \N{NO-BREAK SPACE}👩\u200d🚀 \u200f", "é日本😀 \N{NO-BREAK SPACE}👩\u200d🚀 \u200f"),
    ],
)
def test_control_characters_are_shown_and_not_obeyed(text, shown):
    assert printable_lines(text) == shown


def test_on_one_line():
    assert printable("one\ntwo\r\tthree\u202e") == r"one\ntwo\r\tthree\u202e"


KNOWN = {"max_tokens", "stop", "seed"}


@pytest.mark.parametrize(
    ("name", "prefix", "expected"),
    [
        ("max_token", "", "; did you mean 'max_tokens'?"),
        ("stops", "response.", "; did you mean 'response.stop'?"),
        ("temperature", "", ""),
        ("", "", ""),
        ("max_tokens" * 100_000, "", ""),
    ],
)
def test_the_nearest_name(name, prefix, expected):
    assert did_you_mean(name, KNOWN, prefix) == expected


OPENAI = {"messages", "stream", "min_p", "response_format", "temperature", "top_p", "top_k", "max_tokens", "min_tokens"}
REALTIME = {"input", "instructions", "stop", "max_output_tokens", "min_tokens", "output_modalities"}


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("temp", OPENAI, "temperature"),
        ("top", OPENAI, "top_p"),
        ("te", OPENAI, None),
        ("system", OPENAI, "messages"),
        ("input", OPENAI, "messages"),
        ("reasoning_effort", OPENAI, None),
        ("max_new_tokens", OPENAI, "max_tokens"),
        ("prompt", OPENAI | {"prompt_cache_key"}, "messages"),
        ("stop_sequences", OPENAI, None),
        ("max_tokens", REALTIME, "max_output_tokens"),
        ("maxTokens", REALTIME, "max_output_tokens"),
        ("max_token", REALTIME, "max_output_tokens"),
        ("min_token", REALTIME, "min_tokens"),
        ("system", REALTIME, "instructions"),
        ("stop_sequences", REALTIME, "stop"),
    ],
)
def test_beginnings_and_the_names_of_other_interfaces(name, known, meant):
    assert did_you_mean(name, known) == (f"; did you mean {meant!r}?" if meant else "")


def test_a_count_has_its_noun():
    assert [counted(count, "request") for count in (0, 1, 2)] == ["0 requests", "1 request", "2 requests"]
