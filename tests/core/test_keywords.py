"""Configuration, sampling parameters and the overflow policy as arguments of calls."""

import dataclasses
import re
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine import EngineConfig, InvalidConfig, RequestRejected, SamplingParams, UnknownArgument
from trioengine.core.config import EngineOptions, merged_config
from trioengine.core.sampling_params import (
    SamplingOptions,
    check_overflow,
    check_retention_ratio,
    check_room,
    merged_params,
    prompt_limit,
    retained,
    sampling_checked,
)


@sampling_checked
def generate(prompt, params=None, **options):
    return merged_params(params, options)


@pytest.mark.parametrize(("options", "dataclass"), [(SamplingOptions, SamplingParams), (EngineOptions, EngineConfig)])
def test_the_keywords_are_the_fields(options, dataclass):
    assert set(get_type_hints(options)) == {field.name for field in dataclasses.fields(dataclass)}


def test_keywords_go_before_the_fields_of_the_params():
    params = SamplingParams(max_tokens=5, temperature=0)
    assert merged_params(params, {"max_tokens": 7}) == SamplingParams(max_tokens=7, temperature=0)
    assert merged_params(None, {"stop": "x"}) == SamplingParams(stop="x")
    assert merged_params(None, {}) == SamplingParams()
    assert params.max_tokens == 5


def test_a_bad_value_is_rejected_as_in_the_params():
    with pytest.raises(RequestRejected, match="max_tokens must be") as refused:
        merged_params(SamplingParams(), {"max_tokens": 0})
    assert refused.value.param == "max_tokens"
    with pytest.raises(RequestRejected, match="params must be SamplingParams, got dict"):
        merged_params({"max_tokens": 3}, {})


@pytest.mark.parametrize(
    ("name", "nearest"), [("max_token", "'max_tokens'"), ("temprature", "'temperature'"), ("timout", "'timeout'")]
)
def test_an_unknown_sampling_parameter_names_the_nearest(name, nearest):
    with pytest.raises(TypeError, match=f"has no argument '{name}'; did you mean {nearest}"):
        generate(None, **{name: 1})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("messages", "did you mean 'prompt'?"),
        ("sampling_params", "did you mean 'params'?"),
        ("stream", "session.generate(...) gives an answer in chunks"),
    ],
)
def test_a_name_of_another_library_goes_before_a_missing_prompt(name, hint):
    with pytest.raises(UnknownArgument, match=rf"^generate\(\) has no argument '{name}'; {re.escape(hint)}$"):
        generate(**{name: 1})


def test_an_unknown_field_that_is_like_no_other():
    with pytest.raises(TypeError, match=r"^generate\(\) has no argument 'xyzzy'$"):
        generate(None, xyzzy=1)


def test_a_keyword_of_another_call_is_unknown():
    """`session.generate` has `keep_partial`, `engine.generate` has not."""
    with pytest.raises(UnknownArgument, match=r"^generate\(\) has no argument 'keep_partial'$"):
        generate(None, keep_partial=True)
    with pytest.raises(UnknownArgument, match=r"^open_engine\(\) has no argument 'ports'$"):
        merged_config("toy", {"ports": None})


def test_a_configuration_is_made_of_a_model_and_fields():
    assert merged_config("toy", {"max_model_len": 64}) == EngineConfig(model="toy", max_model_len=64)
    assert merged_config(None, {"model": "toy"}) == EngineConfig(model="toy")
    assert merged_config(None, {}) == EngineConfig()
    config = EngineConfig(model="toy")
    assert merged_config(config, {}) is config


def test_a_configuration_and_fields_are_not_mixed():
    with pytest.raises(TypeError, match=r"either an EngineConfig or its fields \(max_model_len\), not both"):
        merged_config(EngineConfig(), {"max_model_len": 64})
    with pytest.raises(TypeError, match="the model is given twice"):
        merged_config("toy", {"model": "toy"})


def test_an_unknown_field_of_the_configuration_names_the_nearest():
    with pytest.raises(TypeError, match=r"^open_engine\(\) has no .* did you mean 'max_model_len'"):
        merged_config("toy", {"max_model_length": 64})
    with pytest.raises(InvalidConfig, match="max_model_len must be"):
        merged_config("toy", {"max_model_len": -1})


async def test_ask_is_generate_under_another_name():
    async def answer(prompt: str, *, timeout: float | None = None, **options: object) -> tuple[object, ...]:
        return prompt, timeout, options

    ask = sampling_checked(answer, "ask")
    assert await ask("x", timeout=1, max_tokens=2) == ("x", 1, {"max_tokens": 2})
    for name in ("keep_partial", "options"):
        with pytest.raises(UnknownArgument, match=rf"^ask\(\) has no argument '{name}'"):
            await ask("x", **{name: True})


def test_the_policies_have_these_names():
    assert [check_overflow(name) for name in ("refuse", "drop_oldest_turns")] == ["refuse", "drop_oldest_turns"]


@pytest.mark.parametrize("overflow", ["drop", "", None, True, ["refuse"]])
def test_another_policy_is_refused(overflow):
    with pytest.raises(RequestRejected, match="overflow must be 'refuse' or 'drop_oldest_turns', got") as refused:
        check_overflow(overflow)
    assert (refused.value.code, refused.value.param) == ("invalid_value", "overflow")


def test_a_retention_ratio_is_a_part_of_the_limit():
    assert [check_retention_ratio(ratio) for ratio in (0, 0.5, 1)] == [0, 0.5, 1]


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), "half", None, True])
def test_another_retention_ratio_is_refused(ratio):
    with pytest.raises(RequestRejected, match="retention_ratio must be ") as refused:
        check_retention_ratio(ratio)
    assert refused.value.param == "retention_ratio"


@pytest.mark.parametrize(("max_tokens", "limit"), [(None, 384), (1, 511), (100, 412), (256, 256), (9999, 256)])
def test_there_is_room_for_the_answer(max_tokens, limit):
    assert prompt_limit(512, max_tokens) == limit


@given(limit=st.integers(0, 2**31 - 1), low=st.floats(0, 1), high=st.floats(0, 1))
def test_a_ratio_of_the_limit_is_retained(limit, low, high):
    low, high = sorted((low, high))
    assert 0 <= retained(limit, low) <= retained(limit, high) <= limit
    assert retained(limit, low) <= limit * low < retained(limit, low) + 1
    assert (retained(limit, 0), retained(limit, 1)) == (0, limit)


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "problem"),
    [
        (511, None, None),
        (511, 1, None),
        (512, 0, None),
        (512, None, "prompt: 512 tokens leave no room for an answer in a context of 512"),
        (512, 1, "prompt: 512 tokens leave no room for an answer in a context of 512"),
        (513, 0, "prompt: 513 tokens are too many for a context of 512"),
    ],
)
def test_room_for_an_answer(num_tokens, max_tokens, problem):
    if problem is None:
        check_room(num_tokens, 512, max_tokens)
        return
    with pytest.raises(RequestRejected) as refused:
        check_room(num_tokens, 512, max_tokens)
    assert (refused.value.code, refused.value.message) == ("context_length_exceeded", problem)
    assert refused.value.param == "prompt"
