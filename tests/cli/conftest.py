"""What commands change in the process that runs them, undone."""

import logging

import pytest


@pytest.fixture(autouse=True)
def logging_as_it_was():
    """Other tests count what is logged: `serve` sets the level, and its handler stays."""
    root, ours = logging.getLogger(), logging.getLogger("trioengine")
    level, root_level, handlers = ours.level, root.level, root.handlers[:]
    yield
    ours.setLevel(level)
    root.setLevel(root_level)
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
