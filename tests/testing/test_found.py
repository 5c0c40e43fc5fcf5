"""Bugs that the fuzzer found, by the programs that it shrank them to."""

import pytest
from helpers.found_steps import ASK, ASK_MORE, BEGIN, EMPTY, SHOW, A

from trioengine.testing.fuzz.machines import MACHINES, machine_of
from trioengine.testing.fuzz.program import Program, replay
from trioengine.testing.fuzz.runner import silence

FOUND_IN_THE_ENGINE = {
    "an engine that is cancelled while its worker cannot start raises that in a group": [
        ("begin", {"ready": False, "sessions": 1, "turns": 0, "asks": 0, "thread_passes": 1}),
        ("call", {"what": "ask", "wait": False, "which": 0}),
        ("outage", {"way": "starts fail"}),
        ("tick", {"passes": 4, "order": 0}),
        ("outage", {"way": "cancel"}),
    ],
    "a drain says that everything ended by itself, when the engine was closed meanwhile": [
        BEGIN,
        ("ask_so", A),
        ("tick", {"passes": 2, "order": 0}),
        ("outage", {"way": "close"}),
        ("outage", {"way": "drain"}),
    ],
    "what was to be kept of an answer is lost when its session ends": [
        BEGIN,
        (
            "ask_so",
            {
                "which": 0,
                "prompt": "a",
                "stop": "",
                "style": "all",
                "keep_partial": True,
                "timeout": None,
                "wait": False,
                "ignore_eos": False,
            },
        ),
        ("tick", {"passes": 4, "order": 0}),
        ("flow", {"rounds": 8}),
        ("leave", {"which": 0, "what": "leave"}),
        ("settle", {}),
    ],
    "what a stop string held back is in the answer, and in no chunk, when the session ends": [
        BEGIN,
        ("ask_so", A | {"stop": "a b"}),
        *[("flow", {"rounds": 1})] * 16,
        ("outage", {"way": "close"}),
        ("settle", {}),
    ],
    "a request that is refused, and aborted before it hears of that, is counted twice": [
        ("begin", {"ready": False, "sessions": 0, "turns": 0, "asks": 0, "thread_passes": 1}),
        ("call", {"what": "ask", "wait": True, "which": 0}),
        ("flow", {"rounds": 1}),
        ("outage", {"way": "close"}),
        ("outage", {"way": "abort all"}),
    ],
    "a one-shot request of an engine that ends is told that its session has ended": [
        BEGIN,
        ("kill_worker", {"last_bytes": 0}),
        ("settle", {}),
        ("kill_worker", {"last_bytes": 0}),
        ("settle", {}),
        ("call", {"what": "ask", "wait": True, "which": 0}),
        ("settle", {}),
        ("outage", {"way": "cancel"}),
        ("settle", {}),
    ],
    "a session is refused as the engine is closed, in the pass before it is": [
        EMPTY,
        ("open_many", {"sessions": 2, "first": 1, "wait": False, "passes": 0}),
        ("tick", {"passes": 4, "order": 0}),
        ("outage", {"way": "cancel"}),
        ("tick", {"passes": 1, "order": 1954}),
    ],
    "a history without images is refused while a request waits for room for its own": [
        EMPTY,
        ("open_many", {"sessions": 4, "first": 0, "wait": True, "passes": 0}),
        ("tick", {"passes": 4, "order": 0}),
        ("replace_history", {"which": 0, "turns": 0}),
    ],
    "a small image overtakes large ones that wait for room": [
        BEGIN,
        ("show", SHOW | {"media": "one"}),
        ("tick", {"passes": 8, "order": 0}),
        ("show_once", {"media": "two one", "wait": True, "timeout": None}),
        ("tick", {"passes": 8, "order": 0}),
        ("open_with", {"which": 0, "is_new": True, "wait": True, "timeout": None}),
        ("tick", {"passes": 8, "order": 0}),
    ],
}
FOUND_IN_REALTIME = {
    "a client says goodbye, and reads no more: the answer to its goodbye waits for room, for ever": [
        ("begin", {"ready": True, "clients": 1, "turns": 0, "window": 0}),
        ("go", {"which": 0, "how": "stall"}),
        *[("send", {"which": 0, "what": "say"})] * 2,
        ("settle", {}),
        ("go", {"which": 0, "how": "close"}),
        ("go", {"which": 0, "how": "stall"}),
        ("flow", {"rounds": 2}),
        ("go", {"which": 0, "how": "vanish"}),
    ],
    "the first text of a response does not wait for room": [
        ("begin", {"ready": True, "clients": 1, "turns": 0, "window": 0}),
        ("send", {"which": 0, "what": "say"}),
        ("settle", {}),
        ("go", {"which": 0, "how": "stall"}),
        *[("send", {"which": 0, "what": "say"})] * 3,
        ("send", {"which": 0, "what": "respond"}),
        ("settle", {}),
    ],
    "a response begins in the moment of the goodbye, and its end is not sent": [
        ("begin", {"ready": True, "clients": 1, "turns": 0, "window": 0}),
        ("ask", {"which": 0, "prompt": "a", "max_tokens": 1, "rounds": 0}),
        *[("advance", {"seconds": 11.0})] * 2,
        ("ask_beside", {"which": 0, "text": "", "rounds": 9}),
        ("tick", {"passes": 1, "order": 0}),
        ("outage", {"way": "drain"}),
        ("ask", {"which": 0, "prompt": "a", "max_tokens": 1, "rounds": 9}),
    ],
    "a response begins in the moment of the goodbye, and never ends": [
        ("begin", {"ready": True, "clients": 1, "turns": 0, "window": 0}),
        ("ask", {"which": 0, "prompt": "a", "max_tokens": 1, "rounds": 9}),
        ("connect", {}),
        ("tick", {"passes": 1, "order": 0}),
        ("ask_beside", {"which": 0, "text": "", "rounds": 9}),
        *[("flow", {"rounds": 1})] * 2,
        ("outage", {"way": "drain"}),
        ("ask", {"which": 0, "prompt": "a", "max_tokens": 1, "rounds": 0}),
        ("settle", {}),
    ],
}
FOUND_IN_HTTP = {
    "the end of a stream waits for room, for ever": [
        ("begin", {"ready": True, "clients": 1}),
        *[("connect", {"key": 0})] * 2,
        ("settle", {}),
        ("go", {"which": 0, "how": "close"}),
        ("ask", {"which": 0, "prompt": "a", "max_tokens": 3, "streams": True, "how": "whole", "rounds": 20}),
        ("advance", {"seconds": 0.2}),
        ("go", {"which": 0, "how": "vanish"}),
    ],
    "a comment comes after the end of a stream, while its session is being released": [
        ("begin", {"ready": True, "clients": 1}),
        ("switch", {"which": 0, "how": "/wake_up", "rounds": 12}),
        ("ask_more", ASK_MORE | {"streams": True, "stop": "a", "rounds": 20}),
        ("abort", {"which": 0, "request": 0, "rounds": 6}),
        *[("advance", {"seconds": 11.0})] * 2,
        ("abort", {"which": 0, "request": 0, "rounds": 6}),
    ],
}
UPDATE = ("update", {"mode": "abort", "path": "new"})
FOUND_IN_POWER = {
    "an update fails with its worker, and the gate is open for sessions before the change has ended": [
        EMPTY,
        UPDATE,
        ("kill_worker", {"last_bytes": 0}),
        ("call", {"what": "ask", "wait": True, "which": 0}),
    ],
    "a change that is asked for in the pass in which the engine ends is never answered": [
        EMPTY,
        UPDATE,
        ("outage", {"way": "cancel"}),
        ("tick", {"passes": 1, "order": 1}),
    ],
    "a wake without reload that failed: the next update wakes the weights all the same": [
        EMPTY,
        ("fail_wake", {}),
        ("sleep", {"level": 2, "mode": "abort", "turns": 0}),
        ("wake", {"tags": None, "reload": False}),
        UPDATE,
        ("settle", {}),
    ],
    "weights that were left asleep for an update and then woken are woken again by the update": [
        EMPTY,
        ("sleep", {"level": 2, "mode": "abort", "turns": 0}),
        ("wake", {"tags": "weights", "reload": False}),
        ("wake", {"tags": "weights", "reload": True}),
        UPDATE,
    ],
    "a worker is READY while an update begins that lets requests finish: they go on never, and it waits for ever": [
        ("begin", {"ready": True, "sessions": 1, "turns": 0, "asks": 0, "thread_passes": 4}),
        UPDATE,
        ("settle", {}),
        *[("advance", {"seconds": 11.0})] * 2,
        ("ask_so", A),
        ("flow", {"rounds": 8}),
        ("update", {"mode": "wait", "path": "new"}),
        ("flow", {"rounds": 4}),
    ],
    "weights are loaded as the engine closes, and its last state had the old ones": [
        ("begin", {"ready": True, "sessions": 1, "turns": 1, "asks": 0, "thread_passes": 1}),
        ("update", {"mode": "abort", "path": "new"}),
        ("outage", {"way": "garbage"}),
        ("cross", {"which": 0, "what": "abort"}),
        ("outage", {"way": "close"}),
    ],
    "an answer without a token names weights, of rows that came after its abort": [
        ("begin", {"ready": True, "sessions": 1, "turns": 0, "asks": 1, "thread_passes": 1}),
        ("tick", {"passes": 3, "order": 0}),
        *[("flow", {"rounds": 1})] * 3,
        ("flow", {"rounds": 7}),
        ("leave", {"which": 0, "what": "leave"}),
    ],
    "a request that is to be tried has lost an image: it ends while it is resumed, and the engine is ready twice": [
        EMPTY,
        ("open_with", {"which": 0, "is_new": False, "wait": None, "timeout": None}),
        ("settle", {}),
        ("open", {"wait": False}),
        ("ask_for_death", {"which": 0, "others": 0, "num_tokens": 0, "rounds": 0, "change": "sleep"}),
        ("settle", {}),
        ("show", SHOW | {"media": "two one"}),
        ("sleep", {"level": 1, "mode": "keep", "turns": 0}),
    ],
    "a request that was tried ends while it is detached, and its session takes the next one before it can": [
        ("begin", {"ready": True, "sessions": 1, "turns": 1, "asks": 0, "thread_passes": 1}),
        ("open", {"wait": False}),
        ("ask_for_death", {"num_tokens": 3, "others": 0, "which": 0, "rounds": 0, "change": "sleep"}),
        *[("open", {"wait": False})] * 2,
        ("ask_for_death", {"num_tokens": 0, "others": 0, "which": 0, "rounds": 0, "change": "sleep"}),
        ("ask_for_death", {"num_tokens": 0, "others": 1, "which": 0, "rounds": 0, "change": "sleep"}),
        ("stop_reading", {"what": "abort", "which": 2}),
        ("ask_for_death", {"num_tokens": 0, "others": 0, "which": 2, "rounds": 0, "change": "sleep"}),
    ],
}
FOUND = {
    "EngineMachine": FOUND_IN_THE_ENGINE,
    "PowerMachine": FOUND_IN_POWER,
    "RealtimeMachine": FOUND_IN_REALTIME,
    "HttpMachine": FOUND_IN_HTTP,
}


@pytest.mark.parametrize(
    ("machine", "steps"),
    [pytest.param(machine, steps, id=name) for machine, found in FOUND.items() for name, steps in found.items()],
)
def test_what_was_found(machine, steps):
    with silence():
        assert replay(MACHINES[machine](), Program(machine, steps)) == 0, "every step is possible"


def test_an_engine_that_gives_up_refuses_callers_before_it_is_closed():
    """The state was still `restarting` for some passes."""
    steps = [
        ("begin", {"ready": False, "sessions": 2, "turns": 0, "asks": 0, "thread_passes": 3}),
        ("open_with", {"which": 0, "is_new": False, "wait": True, "timeout": None}),
        ("open", {"wait": False}),
        ("open_with", {"which": 0, "is_new": False, "wait": True, "timeout": None}),
        ("open_with", {"which": 0, "is_new": False, "wait": None, "timeout": None}),
        ("tick", {"passes": 1, "order": 336}),
        ("settle", {}),
        ("kill_worker", {"last_bytes": 0}),
        ("open_by_default", {"timeout": None}),
        ("reorder", {"seed": 30}),
        ("call", {"what": "audit", "wait": None, "which": 0}),
        ("ask_to_stop", {"which": 0, "start": 0, "length": 0, "more": None, "other": None, "style": "all"}),
        ("tick", {"passes": 1, "order": 0}),
        ("open_with", {"which": 0, "is_new": False, "wait": None, "timeout": None}),
        ("leave", {"which": 2, "what": "end"}),
    ]
    program = Program("PowerMachine", steps, variant=1)
    with silence():
        assert replay(machine_of(program)(), program) == 0


def test_a_request_waits_for_one_that_times_out_in_the_step_in_which_the_server_has_the_history():
    """It was refused: the session was busy with a request whose caller had its outcome already."""
    steps = [
        ("open", {"wait": None, "timeout": None, "history": 0, "rounds": 6, "gives_up": False}),
        ("flow", {"rounds": 2}),
        ("tick", {"passes": 1, "order": 0}),
        ("open", {"wait": None, "timeout": None, "history": 0, "rounds": 6, "gives_up": False}),
        ("replace_history", {"which": 0, "turns": 1}),
        ("ask_so", ASK | {"timeout": 0.5}),
        ("tick", {"passes": 1, "order": 0}),
        ("ask_so", ASK | {"rounds": 14}),
        ("advance", {"seconds": 1.0}),
    ]
    program = Program("ClientMachine", steps, variant=1)
    with silence():
        assert replay(machine_of(program)(), program) == 0
