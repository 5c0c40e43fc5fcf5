"""The files that a finding names beside its suspects: those that make the value which a check found wrong."""

import importlib
import inspect
from pathlib import Path

import pytest

import trioengine
from trioengine.core.types import Completion, FinishReason, Usage
from trioengine.testing.fuzz import judged as judged_module
from trioengine.testing.fuzz.answers import check_parts
from trioengine.testing.fuzz.describe import ERROR_LINES, error_text
from trioengine.testing.fuzz.judged import judged
from trioengine.testing.fuzz.lifecycle_machine import LifecycleMachine
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer, silence

PACKAGE = Path(trioengine.__file__).parent


def failure_of(check, *args):
    with pytest.raises(AssertionError) as caught:
        check(*args)
    return caught.value


def completion(text):
    return Completion(1, text, (), None, FinishReason.STOP, None, Usage(1, 1, 0))


@pytest.mark.parametrize(("check", "files"), judged_module._JUDGED.items())
def test_checks_and_files_exist(check, files):
    module, _, function = check.partition(".")
    found = importlib.import_module(f"trioengine.testing.fuzz.{module}")
    names = {name for _, kind in inspect.getmembers(found, inspect.isclass) for name in vars(kind)} | set(vars(found))
    assert not function or function in names
    assert all((PACKAGE / file).is_file() for file in files)


def test_a_finding_names_the_files_that_make_the_wrong_value():
    error = failure_of(check_parts, completion("wrong"), "right", None)
    assert judged(error)[0] == "text/output.py"
    assert "\nit judges trioengine/text/output.py, " in error_text(error)


def test_a_failure_of_the_users_program_names_none():
    class Careless(LifecycleMachine):
        async def app(self, engine):
            raise AssertionError("a check of the program")

    with silence():
        failure = Fuzzer(Careless, PROFILES["quick"], seed=0).run(seconds=60).failure
    assert str(failure) == "a check of the program" and judged(failure) == ()


def test_other_failures_name_none():
    error = failure_of(_fail)
    assert judged(error) == () and "it judges" not in error_text(error)


def test_a_long_error_is_cut_and_its_place_stays():
    error = failure_of(_fail, "\n".join(map(str, range(30))))
    lines = error_text(error).splitlines()
    assert lines[:2] == ["AssertionError: 0", "1"] and lines[-2:] == ["... more below", lines[-1]]
    assert lines[-1].startswith(f"at {__file__}:") and len(lines) == ERROR_LINES + 1


def _fail(message="no check of ours"):
    raise AssertionError(message)
