"""A failure is blamed on the code that it comes from: the engine, the server, or the fuzzer."""

import json
from types import SimpleNamespace

from trioengine.actors.session_actor import SessionActor
from trioengine.serve import http
from trioengine.testing.fuzz.engine_machine import EngineMachine
from trioengine.testing.fuzz.http_machine import HttpMachine
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer, silence
from trioengine.testing.fuzz.trace import is_fuzzers_own, place


def failure_of(machine):
    with silence():
        report = Fuzzer(machine, PROFILES["quick"], 0, shrink=False).run(examples=200)
    assert report.failure is not None
    return report.failure


def test_an_exception_that_ends_a_session_is_the_failure(monkeypatch):
    def fail(self):
        raise RuntimeError("a bug")

    monkeypatch.setattr(SessionActor, "_settle", fail)
    failure = failure_of(EngineMachine)
    assert isinstance(failure, RuntimeError) and place(failure).endswith("in fail")
    assert not is_fuzzers_own(failure)


def test_an_answer_that_cannot_be_read_is_the_failure_of_the_server(monkeypatch):
    monkeypatch.setattr(http, "json", SimpleNamespace(dumps=lambda value: json.dumps(value)[:-1]))
    failure = failure_of(HttpMachine)
    assert isinstance(failure, AssertionError) and "a client cannot read the server's bytes" in str(failure)
    assert not is_fuzzers_own(failure)
