"""Programs of which a machine of the fuzzer once complained, and should not have."""

import pytest
from helpers.found_steps import ASK, ASK_MORE, BEGIN, EMPTY, SECONDS

from trioengine.testing.fuzz.machines import machine_of
from trioengine.testing.fuzz.program import Program, replay
from trioengine.testing.fuzz.runner import silence

GRAMMAR = {
    "which": 0,
    "grammar": "choice",
    "streams": False,
    "stop": None,
    "min_tokens": 0,
    "max_tokens": 40,
    "choices": 2,
    "rounds": 9,
}
IN_CALL = {"use": "required", "keep_partial": True}
COME_BACK = {"which": 0, "again": False, "lacks": 0}
FALSE_ALARMS = {
    "a worker in a slow step is terminated, as it does not exit in half of the time for a shutdown": (
        "PowerMachine",
        [
            ("begin", {"ready": True, "sessions": 0, "turns": 0, "asks": 0, "thread_passes": 1}),
            ("open", {"wait": False}),
            ("outage", {"way": "close"}),
            ("tick", {"passes": 4, "order": 0}),
            ("advance", {"seconds": 1.0}),
            ("outage", {"way": "slow step"}),
        ],
    ),
    "requests of a session are admitted in another order than they were started": (
        "EngineMachine",
        [
            BEGIN,
            *[("advance", {"seconds": seconds}) for seconds in SECONDS],
            *[("open", {"wait": False})] * 2,
            ("advance", {"seconds": 0.2}),
            ("flow", {"rounds": 8}),
            ("advance", {"seconds": 0.2}),
            *[("ask", {"which": which, "max_tokens": 1, "reads": True}) for which in (0, 2, 0, 0)],
            ("tick", {"passes": 1, "order": 2}),
        ],
    ),
    "an engine that gives up aborts what is on its way in, some passes before it is over": (
        "EngineMachine",
        [
            BEGIN,
            ("kill_worker", {"last_bytes": 0}),
            ("tick", {"passes": 4, "order": 0}),
            ("call", {"wait": True, "what": "ask", "which": 0}),
            ("tick", {"passes": 5, "order": 0}),
            ("outage", {"way": "fatal"}),
            ("flow", {"rounds": 1}),
            ("advance", {"seconds": 0.2}),
            ("tick", {"passes": 3, "order": 0}),
            ("tick", {"passes": 2, "order": 3}),
        ],
    ),
    "a client is lost while the server sends it many events again, which are then unsent": (
        "RealtimeMachine",
        [
            ("begin", {"ready": True, "clients": 1, "turns": 1, "window": 5}),
            ("come_back", {"which": 0, "how": "take over", "again": False, "share": 0.0, "lacks": 99, "rounds": 6}),
            ("ask", {"which": 0, "prompt": "a", "max_tokens": 1, "rounds": 6}),
            ("come_back", {"which": 0, "how": "reset", "again": False, "share": 0.6, "lacks": 0, "rounds": 6}),
        ],
        2,
    ),
    "a connection whose client has vanished is taken over just before its ping is lost, and closes after that": (
        "RealtimeMachine",
        [
            ("begin", {"ready": True, "clients": 1, "turns": 0, "window": 5}),
            ("come_back", {"which": 0, "how": "vanish", "again": False, "share": 1.0, "lacks": 0, "rounds": 0}),
            ("advance", {"seconds": 11.0}),
            ("come_back", {"which": 0, "how": "take over", "again": False, "share": 1.0, "lacks": 0, "rounds": 0}),
        ],
    ),
    "the clock jumps over the end of a goodbye, and again before the connection has begun to linger": (
        "RealtimeMachine",
        [
            ("begin", {"ready": True, "clients": 1, "turns": 0, "window": 5}),
            ("come_back", {"which": 0, "how": "vanish", "again": False, "share": 0.6, "lacks": 0, "rounds": 0}),
            ("settle", {}),
            ("advance", {"seconds": 11.0}),
            ("tick", {"passes": 1, "order": 0}),
            ("advance", {"seconds": 11.0}),
            ("settle", {}),
        ],
        1,
    ),
    "an aborted server cuts its connections, whose responses release their images before they are over": (
        "RealtimeMachine",
        [
            ("begin", {"ready": True, "clients": 1, "turns": 0, "window": 0}),
            ("choose", {"shows": True}),
            ("show", {"which": 0, "media": "one.file", "prompt": "", "how": "item", "rounds": 0}),
            ("ask", {"which": 0, "prompt": "a", "max_tokens": 1, "rounds": 9}),
            ("show", {"which": 0, "media": "one.file", "prompt": "", "how": "item", "rounds": 6}),
            ("outage", {"way": "abort"}),
            ("advance", {"seconds": 1.0}),
        ],
    ),
    "a sleep that waits for requests keeps those that the sleep before it has suspended, unseen by a rule": (
        "PowerMachine",
        [
            EMPTY,
            ("ask_raw", {"length": 1, "min_tokens": 0, "wait": None}),
            ("sleep", {"level": 1, "mode": "keep", "turns": 1}),
            ("kill_worker", {"last_bytes": 0}),
            ("sleep", {"level": 1, "mode": "wait", "turns": 1}),
        ],
    ),
    "an item in progress is retrieved with the text that was sent": (
        "RealtimeMachine",
        [
            ("begin", {"ready": True, "clients": 1, "turns": 0, "window": 0}),
            ("ask", {"which": 0, "prompt": "a", "max_tokens": 1, "rounds": 9}),
            ("flow", {"rounds": 3}),
            ("ask_beside", {"which": 0, "text": "", "rounds": 9}),
            ("send", {"which": 0, "what": "retrieve"}),
            ("carry", {"which": 0, "to_server": 106, "to_client": 0}),
        ],
    ),
    "a connection beyond the limit is refused before its request, for the health, arrives": (
        "HttpMachine",
        [
            ("begin", {"ready": True, "clients": 1}),
            ("connect", {"key": 0}),
            ("ask_more", ASK_MORE),
            ("abort", {"which": 0, "request": 0, "rounds": 0}),
            ("abort", {"which": 1, "request": 0, "rounds": 6}),
            ("connect", {"key": 0}),
            ("settle", {}),
            ("observe", {"which": 0, "what": "health"}),
            ("advance", {"seconds": 11.0}),
            ("settle", {}),
        ],
    ),
    "no bytes arrive, and wake who waits for some": (
        "RealtimeMachine",
        [
            ("begin", {"ready": True, "clients": 1, "turns": 0, "window": 0}),
            ("ask", {"which": 0, "prompt": "a", "max_tokens": 1, "rounds": 0}),
            ("carry", {"which": 0, "to_server": 0, "to_client": 0}),
            ("settle", {}),
        ],
    ),
    "a drain of an engine that falls asleep aborts the suspended request of a client": (
        "ClientMachine",
        [
            ("begin", {"ready": True, "sessions": 1, "turns": 0, "history": 0}),
            ("ask_so", ASK),
            ("tick", {"passes": 3, "order": 0}),
            ("flow", {"rounds": 4}),
            ("tick", {"passes": 3, "order": 0}),
            ("switch", {"how": "keep"}),
            ("tick", {"passes": 1, "order": 0}),
            ("outage", {"way": "drain"}),
        ],
    ),
    "a request is refused while the first in the line for room, which is aborted, has room": (
        "EngineMachine",
        [
            ("begin", {"ready": True, "sessions": 1, "turns": 0, "asks": 0, "thread_passes": 1}),
            ("stop_showing", {"which": 0, "media": "one", "passes": 1, "what": "abort", "among": True}),
            ("reorder", {"seed": 1}),
            ("show_once", {"media": "one", "wait": False, "timeout": None}),
        ],
        3,
    ),
    "an answer that is aborted ends with the beginning of its stop string": (
        "HttpMachine",
        [
            ("begin", {"ready": True, "clients": 2}),
            ("ask_more", ASK_MORE | {"which": 1, "rounds": 9}),
            ("abort", {"which": 0, "request": 0, "rounds": 0}),
            ("abort", {"which": 0, "request": 0, "rounds": 6}),
            ("ask_more", ASK_MORE | {"streams": True, "stop": "e ", "rounds": 0}),
            ("abort", {"which": 0, "request": 0, "rounds": 6}),
            ("abort", {"which": 0, "request": 0, "rounds": 6}),
            ("ask_more", ASK_MORE),
            ("ask_more", ASK_MORE | {"rounds": 9}),
            ("abort", {"which": 0, "request": 0, "rounds": 9}),
        ],
        2,
    ),
    "a raw request is refused beyond the limit, and shows no id": (
        "HttpMachine",
        [
            ("begin", {"ready": True, "clients": 1}),
            ("connect", {"key": 0}),
            ("observe", {"which": 0, "what": "metrics"}),
            ("ask", {"which": 0, "prompt": "a", "max_tokens": 1, "streams": False, "how": "pieces", "rounds": 6}),
            ("connect", {"key": 0}),
            ("probe", {"which": 0, "name": "url"}),
            ("go", {"which": 0, "how": "half-close"}),
            ("ask", {"which": 0, "prompt": "a", "max_tokens": 1, "streams": False, "how": "whole", "rounds": 6}),
        ],
        2,
    ),
    "a client whose connection is refused while it pauses reads again": (
        "HttpMachine",
        [
            ("begin", {"ready": True, "clients": 1}),
            ("outage", {"way": "drain"}),
            ("tick", {"passes": 1, "order": 0}),
            ("connect", {"key": 0}),
            ("observe", {"which": 0, "what": "metrics"}),
            ("pause", {"which": 0, "rounds": 12, "count": 1, "passes": 1, "order": 0}),
            ("settle", {}),
        ],
        2,
    ),
    "a further choice waits for the first token of one that waits for a wake": (
        "HttpMachine",
        [
            ("begin", {"ready": True, "clients": 1}),
            ("ask_by_grammar", GRAMMAR),
            ("connect", {"key": 0}),
            ("switch", {"which": 0, "how": "/sleep?mode=keep", "rounds": 0}),
            ("settle", {}),
        ],
    ),
    "an abort by a label finds no request in line whose session has just ended": (
        "PowerMachine",
        [
            ("begin", {"ready": True, "sessions": 2, "turns": 0, "asks": 0, "thread_passes": 1}),
            ("reorder", {"seed": 1}),
            ("update", {"path": "new", "mode": "abort"}),
            ("ask_for_death", {"which": 0, "others": 1, "num_tokens": 0, "rounds": 0, "change": "sleep"}),
            ("open_by_default", {"timeout": None}),
            (
                "ask_by_grammar",
                {
                    "which": 0,
                    "grammar": "choice",
                    "style": "all",
                    "stop": "",
                    "min_tokens": 0,
                    "max_tokens": 40,
                    "ignore_eos": False,
                    "keep_partial": False,
                    "media": "",
                    "rounds": 0,
                },
            ),
            ("leave", {"which": 2, "what": "end"}),
            ("stop_reading", {"which": 2, "what": "abort by label"}),
        ],
        3,
    ),
    "a server that is aborted cuts connections that a hanging worker keeps busy": (
        "ClientMachine",
        [
            ("begin", {"ready": True, "sessions": 1, "turns": 0, "history": 0}),
            ("ask_so", ASK),
            ("outage", {"way": "hang"}),
            ("settle", {}),
            ("outage", {"way": "abort"}),
        ],
        2,
    ),
    "a caller has left its request with unread text, and waits until the server has ended it": (
        "ClientMachine",
        [
            ("begin", {"ready": True, "sessions": 1, "turns": 0, "history": 0}),
            ("ask_so", ASK | {"style": "none"}),
            ("go", {"which": 0, "how": "stall"}),
            ("settle", {}),
        ],
        2,
    ),
    "a session ends before it can report dropped turns, and has a turn without a text": (
        "ClientMachine",
        [
            ("begin", {"ready": True, "turns": 0, "sessions": 2, "history": 0}),
            ("ask_so", ASK | {"which": 1, "stop": "e", "keep_partial": False, "rounds": 6}),
            *[("stop_in_call", IN_CALL | {"which": 0, "place": "arguments", "what": "abort"})] * 2,
            ("stop_in_call", IN_CALL | {"which": 1, "place": "behind", "what": "end"}),
        ],
        2,
    ),
    "a session is not resumed at the end of its window, which rounded numbers reach": (
        "RealtimeMachine",
        [
            ("begin", {"turns": 0, "ready": True, "window": 12, "clients": 1}),
            ("come_back", COME_BACK | {"how": "take over", "share": 0.6, "rounds": 0}),
            ("come_back", COME_BACK | {"how": "vanish", "share": 0.9, "again": True, "rounds": 20}),
            ("come_back", COME_BACK | {"how": "reset", "share": 1.0, "rounds": 6}),
        ],
        2,
    ),
    "a client's close crosses that of the server, as another connection has the session": (
        "RealtimeMachine",
        [
            ("begin", {"turns": 0, "ready": True, "window": 12, "clients": 1}),
            ("go", {"which": 0, "how": "close"}),
            ("come_back", COME_BACK | {"how": "take over", "share": 0.0, "rounds": 0}),
            ("go", {"which": 0, "how": "half-close"}),
            ("come_back", COME_BACK | {"how": "take over", "share": 0.6, "rounds": 0}),
        ],
        0,
    ),
    "the body of a client and its `on_state` raise in the same pass": (
        "ClientMachine",
        [
            ("begin", {"ready": False, "sessions": 2, "turns": 0, "history": 0}),
            ("tick", {"passes": 1, "order": 0}),
            ("leave_client", {"how": "dislike"}),
            ("open_called", {"which": 0}),
            ("tick", {"passes": 2, "order": 0}),
            ("flow", {"rounds": 6}),
            ("reorder", {"seed": 188}),
            ("tick", {"passes": 2, "order": 1}),
            ("flow", {"rounds": 7}),
            ("leave_client", {"how": "raise"}),
        ],
        2,
    ),
    "a remembered response begins after a later message was dropped": (
        "RealtimeMachine",
        [
            ("begin", {"ready": True, "clients": 1, "turns": 0, "window": 0}),
            ("ask_beside", {"which": 0, "text": "b", "rounds": 0}),
            ("send", {"which": 0, "what": "answer a call"}),
            *[("send", {"which": 0, "what": "cancel and respond"})] * 2,
            ("send", {"which": 0, "what": "odd"}),
            ("ask_with_tools", {"which": 0, "use": "required", "max_tokens": 66, "rounds": 80}),
        ],
        2,
    ),
}


@pytest.mark.parametrize("program", FALSE_ALARMS.values(), ids=FALSE_ALARMS)
def test_what_was_no_bug(program):
    """Programs that a machine once complained of, and should not have; some with a variant."""
    program = Program(*program)
    with silence():
        replay(machine_of(program)(), program)
