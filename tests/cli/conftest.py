"""Undo the changes of commands to the process that runs them."""

import logging

import pytest


@pytest.fixture(autouse=True)
def logging_as_it_was():
    """Restore the logging that `serve` configures: other tests count records."""
    root, ours = logging.getLogger(), logging.getLogger("trioengine")
    level, root_level, handlers = ours.level, root.level, root.handlers[:]
    yield
    ours.setLevel(level)
    root.setLevel(root_level)
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
