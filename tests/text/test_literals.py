"""A pattern of many strings finds the same as the plain alternatives."""

import re
import time

import hypothesis.strategies as st
from hypothesis import given

from trioengine.text.literals import any_of


@given(st.lists(st.text("ab.|", max_size=4), max_size=8), st.text("ab.|", max_size=20))
def test_the_longest_string_is_found(strings, text):
    longest_first = sorted(filter(None, strings), key=len, reverse=True)
    plain = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    assert re.findall(any_of(strings), text) == plain.findall(text)


def test_strings_that_part_late():
    strings = ["a" * length for length in range(1, 500)]
    assert re.findall(any_of(strings), "a" * 700 + "b") == ["a" * 499, "a" * 201]


def test_searching_among_thousands_takes_no_longer():
    pattern = re.compile(any_of([f"<unused{number}>" for number in range(6000)]))
    started = time.perf_counter()
    assert not pattern.search("<" * 100_000)
    assert time.perf_counter() - started < 1  # with plain alternatives, more than two seconds
