"""Enumerations that compare with their names, and short reprs."""

import dataclasses

import pytest

import trioengine
from trioengine import EngineConfig, Power, SamplingParams
from trioengine.core.types import Cause, Completion, FinishReason, Usage


@pytest.mark.parametrize("enumeration", [FinishReason, Cause, Power])
def test_a_member_is_its_name(enumeration):
    for member in enumeration:
        assert member == member.value
        assert f"{member}" == member.value
        assert {member.value: 1}[member] == 1


def test_every_public_name_is_there():
    for name in trioengine.__all__:
        assert getattr(trioengine, name) is not None
    names = {"Cause", "ChatMessage", "Chunk", "FinishReason", "Power", "PowerState", "Prompt", "Statistics", "TimedOut"}
    assert names <= set(trioengine.__all__)


def test_a_configuration_shows_what_was_changed():
    assert repr(EngineConfig()) == "EngineConfig()"
    config = EngineConfig(model="toy", max_num_seqs=4)
    assert repr(config) == "EngineConfig(model='toy', max_num_seqs=4)"
    assert eval(repr(config)) == config


def test_sampling_parameters_show_what_was_changed():
    assert repr(SamplingParams()) == "SamplingParams()"
    params = SamplingParams(max_tokens=4, stop="x", logit_bias={3: 1})
    assert repr(params) == "SamplingParams(max_tokens=4, stop=('x',), logit_bias={3: 1.0})"
    assert eval(repr(params)) == params


def test_a_completion_shows_the_beginning_of_its_text_and_its_counts():
    usage = Usage(36, 500, 0)
    completion = Completion(7, "to be " * 100, tuple(range(500)), None, FinishReason.LENGTH, None, usage)
    assert repr(completion).startswith("<Completion 7 'to be to be ")
    assert repr(completion).endswith("… length, 36 + 500 tokens>")
    assert len(repr(completion)) < 140
    aborted = dataclasses.replace(completion, text="hi", finish_reason=FinishReason.ABORT, cause=Cause.TIMEOUT)
    assert repr(aborted) == "<Completion 7 'hi' abort (timeout), 36 + 500 tokens>"
