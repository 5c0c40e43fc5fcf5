"""Values from files and users in messages: short, printable, and made with little memory."""

import tracemalloc

import pytest

from trioengine.core.bounds import brief, excerpt, is_key

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
    ("value", "is_valid"),
    [("sk-Key_1~!", True), ("", False), ("a b", False), ("ä", False), ("a\n", False), (b"a", False)],
)
def test_a_key_is_visible_ascii(value, is_valid):
    assert is_key(value) is is_valid
