"""The log of a command: its two formats, its level, and the secrets that are never in it."""

import json
import logging

import pytest

from trioengine.cli.logs import configure_logs
from trioengine.serve.log_fields import CLIENT, REQUEST_ID, set_fields


@pytest.fixture
def logs(capsys):
    """A function that configures the logs from scratch, and returns one that reads the lines."""
    root, ours = logging.getLogger(), logging.getLogger("trioengine")
    before = root.handlers[:], root.level, ours.level

    def configure(level="info", *, as_json):
        root.handlers[:] = []
        configure_logs(level, as_json=as_json)
        return lambda: capsys.readouterr().err.splitlines()

    yield configure
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def test_lines(logs):
    lines = logs(as_json=False)
    logger = logging.getLogger("trioengine")
    logger.info("ready: %s", "toy")
    with set_fields({REQUEST_ID: "req_1", CLIENT: "[::1]:5"}):
        logger.warning("oh")
    first, second = lines()
    assert first.endswith(" INFO trioengine: ready: toy")
    assert second.endswith(" WARNING trioengine: oh [request_id=req_1 client=[::1]:5]")


def test_text_from_outside_is_not_obeyed(logs):
    lines = logs(as_json=False)
    try:
        raise ValueError("\x1b[2J\u202e")
    except ValueError:
        logging.getLogger("trioengine").exception("loading %s", "a\x1b]0;title\x07\n2026 forged")
    shown = lines()
    assert shown[0].endswith(r" ERROR trioengine: loading a\x1b]0;title\x07\n2026 forged")
    assert shown[-1] == r"ValueError: \x1b[2J\u202e"


def test_json(logs):
    lines = logs(as_json=True)
    logger = logging.getLogger("trioengine.access")
    with set_fields({REQUEST_ID: "a\nb"}):
        logger.info("GET %s", "/", extra={"method": "GET", "status": 200})
    try:
        raise ZeroDivisionError("oh\nno")
    except ZeroDivisionError:
        logger.exception("it\ncrashed")
    first, second = map(json.loads, lines())
    time = first.pop("time")
    assert time.endswith("+00:00")
    assert first == {
        "level": "info",
        "logger": "trioengine.access",
        "message": "GET /",
        "request_id": "a\nb",
        "method": "GET",
        "status": 200,
    }
    assert (second["level"], second["message"]) == ("error", "it\ncrashed")
    assert second["exception"].startswith("Traceback")
    assert "ZeroDivisionError: oh\nno" in second["exception"]


@pytest.mark.parametrize(("level", "shown"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_levels(logs, level, shown):
    lines = logs(level, as_json=False)
    for number in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logging.getLogger("trioengine").log(number, "x")
    assert len(lines()) == shown


def test_the_details_of_other_libraries_are_not_shown(logs):
    """trio-websocket's have the headers of a handshake, with the key."""
    lines = logs("debug", as_json=False)
    logging.getLogger("trio-websocket").debug("secret")
    assert lines() == []
