"""Grammars are compiled in threads: the event loop runs on, and so do the worker's steps for other requests."""

from __future__ import annotations

import sys
import threading
import time

from trioengine import Grammar
from trioengine.testing.toy_grammar import toy_compile
from trioengine.text.grammar import check_grammar

WORDS = [f"{number:04}{'abcdefgh'[number % 8]}" for number in range(700)]
SLOW = Grammar.json_schema({"enum": [{"a": word, "b": [1, 2, {"c": word}]} for word in WORDS]})


def passes_during(function):
    """Count how often another thread gets its turn while the function runs in its own."""
    done, count = threading.Event(), 0
    thread = threading.Thread(target=lambda: (function(SLOW), done.set()))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)  # a thread that holds the GIL is not made to give it up
    try:
        thread.start()
        while not done.is_set():
            time.sleep(0)  # gives the GIL up
            count += 1
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    return count


def test_compiling_releases_the_gil():
    for function in (check_grammar, toy_compile):
        assert passes_during(function) > 1000
